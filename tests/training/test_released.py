"""LD's released code, as a loop over pairs, beside the published formulas: where they differ, and by what."""

import math

import pytest
import slow_losses
import torch
from loss_cases import random_states, value_and_gradient

from lmeval_dispersion.training import losses


def test_released_decorrelation_is_that_of_tokens():
    z = random_states(3, 8, 6)
    ours, gradient = value_and_gradient(losses.decorrelation, z, axis="tokens")
    theirs, their_gradient = value_and_gradient(lambda x: slow_losses.released("decorrelation", x), z)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, their_gradient)


def test_away_from_the_clamp_they_differ_by_the_added_hundredth_and_the_diagonal():
    """With long vectors (their length plus 0.01 is their length) and no cosine beyond 0.75."""
    z = 1e6 * torch.eye(6, dtype=torch.float64).expand(2, 6, 6) + 1e5 * random_states(2, 6, 6)
    cosines = torch.nn.functional.cosine_similarity(z[:, :, None], z[:, None], dim=-1)
    assert float(cosines.masked_fill(torch.eye(6, dtype=torch.bool), 0).abs().max()) < 0.75
    spread = losses.angular_spread(z)
    torch.testing.assert_close(slow_losses.released("angular_spread", z), spread + 0.01, rtol=1e-6, atol=0)
    hinge = losses.orthogonalization(z)
    # The hundredth stands in its exponents only.
    torch.testing.assert_close(slow_losses.released("orthogonalization", z), hinge, rtol=1e-5, atol=1e-8)
    near = random_states(1, 8, 6)
    pairs = losses.l2_repel(near, norm_weight=0.0).exp() * 8 * 7
    counted = ((pairs + 8) / 64).log() + 0.01 + 0.1 * near.square().mean()
    torch.testing.assert_close(slow_losses.released("l2_repel", near), counted)


@pytest.mark.parametrize("clamp", [0.25, 0.1])
def test_inside_the_clamp_the_released_value_does_not_move_and_its_gradient_is_push_aways(clamp):
    z = 100 * (random_states(1, 1, 6, seed=1) + 0.02 * random_states(2, 8, 6))
    value, gradient = value_and_gradient(lambda x: slow_losses.released("angular_spread", x, clamp=clamp), z)
    assert float(value) == pytest.approx(0.01 - math.acos(1 - clamp) / math.pi, abs=1e-6)
    _, push = value_and_gradient(losses.push_away, z, pairs="sequence")
    cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), push.flatten(), dim=0)
    assert float(cosine) > 0.999


def test_the_released_code_counts_padding():
    """Repeated padding rows move the released loss; a mask cures ours."""
    z = random_states(1, 20, 6)
    padded = torch.cat([z, z[:, :1].expand(1, 10, 6)], dim=1)
    released = [slow_losses.released("angular_spread", x) for x in (padded, z)]
    assert abs(released[0] - released[1]) > 0.02
    mask = torch.arange(30).unsqueeze(0) < 20
    torch.testing.assert_close(losses.angular_spread(padded, mask=mask), losses.angular_spread(z))
