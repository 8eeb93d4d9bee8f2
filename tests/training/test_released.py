"""The released code's values, against a loop over pairs."""

import pytest
import slow_losses
import torch
from loss_cases import random_states, value_and_gradient

from lmeval_dispersion.training import losses


@pytest.mark.parametrize("name", ["angular_spread", "orthogonalization", "l2_repel", "decorrelation"])
@pytest.mark.parametrize("spread", [1.0, 0.05])
def test_released_gives_the_released_value(name, spread):
    z = random_states(1, 1, 6, seed=2) + spread * random_states(3, 8, 6, seed=3)
    value, gradient = value_and_gradient(getattr(losses, name), z, released=True)
    slow, slow_gradient = value_and_gradient(lambda x: slow_losses.released(name, x), z)
    torch.testing.assert_close(value, slow)
    torch.testing.assert_close(gradient, slow_gradient)
    if name in ("angular_spread", "orthogonalization"):
        command_line = getattr(losses, name)(z, released=True, clamp=0.1)
        torch.testing.assert_close(command_line, slow_losses.released(name, z, clamp=0.1))
    parts = getattr(losses, name)(
        z, released=True, segments=torch.tensor([[0] * 3 + [1] * 5] * 3), mask=torch.ones(3, 8).bool()
    )
    halves = torch.stack([slow_losses.released(name, x) for x in (z[:, :3], z[:, 3:])])
    if name != "l2_repel":  # its norm term weighs points, not documents, when lengths differ
        torch.testing.assert_close(parts, halves.mean())


def test_released_counts_padding_where_no_mask_is_given():
    """The defect that a mask cures: repeated padding rows move the released loss."""
    z = random_states(1, 20, 6)
    padded = torch.cat([z, z[:, :1].expand(1, 10, 6)], dim=1)
    mask = torch.arange(30).unsqueeze(0) < 20
    assert abs(losses.angular_spread(padded, released=True) - losses.angular_spread(z, released=True)) > 0.02
    torch.testing.assert_close(
        losses.angular_spread(padded, released=True, mask=mask), losses.angular_spread(z, released=True)
    )
