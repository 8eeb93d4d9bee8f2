"""LD's released code, as a loop over pairs, beside the published formulas: where they differ, and by what."""

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
