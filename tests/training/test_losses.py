"""Losses against slow loops, values by hand, draws of tokens, errors; losses as modules."""

import math

import pytest
import slow_losses
import torch
from loss_cases import VARIANTS, cases, random_states, value_and_gradient

from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.training import losses
from lmeval_dispersion.training.losses import LOSSES, DispersionLoss
from lmeval_dispersion.training.pairs import GUARD


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("variant", VARIANTS)
def test_value_and_gradient_equal_a_loop_over_pairs(variant, case):
    name, options = VARIANTS[variant]
    z, given = cases()[case]
    options = options | given
    value, gradient = value_and_gradient(getattr(losses, name), z, **options)
    slow_value, slow_gradient = value_and_gradient(getattr(slow_losses, name), z, **options)
    torch.testing.assert_close(value, slow_value, rtol=1e-9, atol=1e-10)
    # Near a cosine of +-1 the slope of arccos magnifies rounding of the cosine by up to 1/GUARD.
    torch.testing.assert_close(gradient, slow_gradient, rtol=1e-6, atol=1e-8)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_input_is_computed_in_float32(variant, dtype):
    name, options = VARIANTS[variant]
    z = random_states(2, 12, 16).to(dtype)
    value, gradient = value_and_gradient(getattr(losses, name), z, **options)
    exact, exact_gradient = value_and_gradient(getattr(losses, name), z.double(), **options)
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=2e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        gradient.double(), exact_gradient, rtol=tolerance, atol=tolerance * float(exact_gradient.abs().max())
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = getattr(losses, name)(z, **options)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, value, rtol=0, atol=0)


@pytest.mark.parametrize("mask", [None, torch.tensor([[1] * 6 + [0], [1] * 7, [1] * 7]).bool()])
def test_cross_domain(mask):
    z, domains = random_states(3, 7, 5), torch.tensor([4, 2, 4])
    given = {"domains": domains, "mask": mask}
    value, gradient = value_and_gradient(losses.cross_domain_push_away, z, **given)
    slow, slow_gradient = value_and_gradient(slow_losses.cross_domain_push_away, z, **given)
    torch.testing.assert_close(value, slow)
    torch.testing.assert_close(gradient, slow_gradient)
    stacked = losses.cross_domain_push_away(torch.stack([z, 2 * z.flip(1)]), domains=domains)
    apart = [losses.cross_domain_push_away(x, domains=domains) for x in (z, 2 * z.flip(1))]
    torch.testing.assert_close(stacked, torch.stack(apart))
    value, gradient = value_and_gradient(losses.cross_domain_push_away, z, domains=torch.zeros(3))
    assert value == 0
    assert (gradient == 0).all()


def test_values_that_can_be_checked_by_hand():
    corner = torch.eye(4).unsqueeze(0)
    same = torch.ones(1, 4, 3)
    assert losses.push_away(corner).item() == pytest.approx(-1.0)
    assert losses.push_away(same).item() == pytest.approx(0.0, abs=1e-6)
    assert losses.angular_spread(corner).item() == pytest.approx(-0.5)
    assert losses.angular_spread(same).item() == pytest.approx(-math.acos(1 - GUARD) / math.pi, abs=1e-4)
    assert losses.orthogonalization(corner).item() == pytest.approx(0.0, abs=1e-12)
    assert losses.orthogonalization(same).item() == pytest.approx(0.25, abs=1e-3)
    assert losses.l2_repel(corner, norm_weight=0.0).item() == pytest.approx(-2.0, abs=1e-6)
    assert losses.l2_repel(same, norm_weight=0.5).item() == pytest.approx(0.5, abs=1e-6)
    assert losses.l2_repel(100 * corner, norm_weight=0.0).item() == pytest.approx(-20000.0, rel=1e-5)
    correlated = torch.tensor([[[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]])
    assert losses.decorrelation(correlated).item() == pytest.approx(1.0, abs=1e-5)


def test_a_small_dispersion_keeps_its_digits():
    """float32 sums over thousands of nearly parallel vectors; the naive sum is off by 4e-5."""
    z = random_states(1, 1, 64, seed=6) + 1e-3 * random_states(1, 5000, 64, seed=7)
    exact = -losses.push_away(z)
    assert float(exact) < 2e-6
    assert abs(-losses.push_away(z.float()).double() - exact) < 1e-7


def test_sampling_has_its_own_generator_and_takes_real_tokens_only():
    z = random_states(2, 50, 4)
    mask = torch.zeros(2, 50, dtype=torch.bool)
    mask[:, 10:30] = True
    before = torch.random.get_rng_state()
    touched = torch.zeros(50, dtype=torch.bool)
    generator = torch.Generator().manual_seed(1)
    values = []
    for _ in range(30):
        value, gradient = value_and_gradient(
            losses.angular_spread, z, mask=mask, max_tokens=7, generator=generator
        )
        used = (gradient != 0).any(-1)
        assert used.sum(-1).tolist() == [7, 7]
        assert not (used[0] == used[1]).all()  # each row has its own draw
        touched |= used.any(0)
        values.append(float(value))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert touched[10:30].all()
    assert not touched[:10].any()
    assert len(set(values)) > 25
    repeat = losses.angular_spread(z, mask=mask, max_tokens=7, generator=torch.Generator().manual_seed(1))
    assert float(repeat) == pytest.approx(values[0], abs=1e-12)
    torch.testing.assert_close(
        losses.angular_spread(z, max_tokens=50), losses.angular_spread(z), rtol=0, atol=0
    )


def test_non_finite_states_are_not_hidden():
    for bad in (float("nan"), float("inf")):
        z = random_states(2, 5, 4)
        z[1, 2, 3] = bad
        for name, options in VARIANTS.values():
            assert torch.isnan(getattr(losses, name)(z, **options)), (name, bad)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda z: losses.push_away(z[0]), GeometryError, "(b, t, d)"),
        (lambda z: losses.push_away(z.long()), GeometryError, "int64"),
        (lambda z: losses.push_away(z[:, :0]), GeometryError, "at least one token"),
        (lambda z: losses.angular_spread(z, mask=torch.ones(2, 4)), GeometryError, "(2, 5), got (2, 4)"),
        (lambda z: losses.angular_spread(z, segments=torch.ones(2, 4)), GeometryError, "`segments`"),
        (lambda z: losses.angular_spread(z, tau=0.0), UsageError, "at least 0.02, got 0.0"),
        (lambda z: losses.angular_spread(z, pairs="rows"), UsageError, "sequence, batch, got 'rows'"),
        (lambda z: losses.angular_spread(z, max_tokens=1), UsageError, "at least 2, got 1"),
        (lambda z: losses.orthogonalization(z, margin=0.0), UsageError, "(0, 1], got 0.0"),
        (lambda z: losses.l2_repel(z, tau=-1.0), UsageError, "got -1.0"),
        (lambda z: losses.l2_repel(z, tau="mean"), UsageError, "got 'mean'"),
        (lambda z: losses.l2_repel(z, norm_weight=-1), UsageError, "got -1"),
        (lambda z: losses.decorrelation(z, axis="rows"), UsageError, "features, tokens, got 'rows'"),
        (lambda z: losses.cross_domain_push_away(z, domains=torch.ones(3)), GeometryError, "got (3,)"),
        (lambda z: losses.push_away(z, pairs="sequence", across_ranks=True), UsageError, "across_ranks"),
        (lambda z: losses.push_away(z, across_ranks=True), UsageError, "torchrun"),
    ],
)
def test_errors_say_expected_given_and_next_step(call, error, said):
    with pytest.raises(error) as caught:
        call(torch.randn(2, 5, 4))
    assert said in str(caught.value)


def test_modules_hold_options_and_repeat_their_draws():
    z = random_states(2, 40, 4)
    loss = DispersionLoss("angular_spread", tau=0.5, max_tokens=8, seed=3)
    first, second = float(loss(z)), float(loss(z))
    assert first != second
    again = DispersionLoss("angular_spread", tau=0.5, max_tokens=8, seed=3)
    again.calls = 1
    assert float(again(z)) == second
    assert float(DispersionLoss("squeeze", pairs="sequence")(z)) == float(losses.squeeze(z, pairs="sequence"))
    domains = torch.tensor([0, 1])
    assert float(DispersionLoss("cross_domain_push_away")(z, domains=domains)) == float(
        losses.cross_domain_push_away(z, domains=domains)
    )
    assert all(DispersionLoss(name).name == function.__name__ for name, function in LOSSES.items())


def test_released_decorrelation_is_that_of_tokens():
    z = random_states(3, 8, 6)
    ours, gradient = value_and_gradient(losses.decorrelation, z, axis="tokens")
    theirs, their_gradient = value_and_gradient(slow_losses.released_decorrelation, z)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, their_gradient)
