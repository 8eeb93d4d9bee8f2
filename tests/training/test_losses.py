"""Losses against slow loops and values by hand, what must not change them, draws of tokens, errors."""

import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import slow_losses
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.training import losses
from lmeval_dispersion.training.losses import LOSSES, DispersionLoss

B, T, D = 3, 9, 6
VARIANTS = {
    name: function for name, function in LOSSES.items() if name != "cross_domain_push_away"
} | {
    "push_away in sequences": partial(losses.push_away, pairs="sequence"),
    "angular_spread tau 0.1": partial(losses.angular_spread, tau=0.1),
    "orthogonalization margin 0.3": partial(losses.orthogonalization, margin=0.3),
    "l2_repel median": partial(losses.l2_repel, tau="median", norm_weight=0.0),
    "decorrelation tokens": partial(losses.decorrelation, axis="tokens"),
}
RELEASED = {
    "angular_spread released": partial(losses.angular_spread, released=True),
    "angular_spread released 0.1": partial(losses.angular_spread, released=0.1, tau=0.3),
    "orthogonalization released": partial(losses.orthogonalization, released=True),
    "l2_repel released": partial(losses.l2_repel, released=True),
    "decorrelation released": partial(losses.decorrelation, released=True),
}
every_loss = pytest.mark.parametrize(
    "loss", [pytest.param(loss, id=name) for name, loss in VARIANTS.items()]
)
every_form = pytest.mark.parametrize(
    "loss", [pytest.param(loss, id=name) for name, loss in (VARIANTS | RELEASED).items()]
)


def random_states(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def cases():
    """States, and the options that say which of them are points of which group."""
    z = random_states(B, T, D)
    ragged, lonely = torch.ones(2, B, T, dtype=torch.bool)
    ragged[0, 6:] = False  # right padding
    ragged[1, :4] = False  # left padding
    lonely[1, 1:] = False  # one token
    lonely[2] = False  # none
    opposite, duplicated, zeros = z.clone(), z.clone(), z.clone()
    opposite[:, 1] = -2.0 * opposite[:, 0]
    duplicated[:, 3:6] = duplicated[:, :1]
    zeros[:, 2] = 0.0
    packed = torch.tensor(
        [[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 7], [0, 1, 0, 1, 0, 1, 0, 1, 0]]
    )
    return {
        "random": (z, {}),
        "condensed": (random_states(1, 1, D, seed=1) + 0.01 * z, {}),
        "opposite": (opposite, {}),
        "duplicated": (duplicated, {}),
        "zero vector": (zeros, {}),
        "padded": (z, {"mask": ragged}),
        "one token": (z, {"mask": lonely}),
        "packed": (z, {"segments": packed}),
        "packed and padded": (zeros, {"segments": packed, "mask": ragged}),
        "all padding": (z, {"mask": torch.zeros(B, T, dtype=torch.bool)}),
        "whole batch": (z, {"mask": ragged, "pairs": "batch"}),
    }


def value_and_gradient(loss, z, **options):
    z = z.detach().clone().requires_grad_()
    value = loss(z, **options)
    (gradient,) = torch.autograd.grad(value, z)
    return value.detach(), gradient


def slow(loss):
    """The same loss, pair by pair."""
    function = getattr(loss, "func", loss)
    return partial(getattr(slow_losses, function.__name__), **getattr(loss, "keywords", {}))


@every_form
@pytest.mark.parametrize("case", cases())
def test_value_and_gradient_equal_a_loop_over_pairs(loss, case):
    z, options = cases()[case]
    value, gradient = value_and_gradient(loss, z, **options)
    slow_value, slow_gradient = value_and_gradient(slow(loss), z, **options)
    torch.testing.assert_close(value, slow_value, rtol=1e-9, atol=1e-10)
    # Near a cosine of +-1 the slope of arccos magnifies rounding of the cosine by up to 1/GUARD.
    torch.testing.assert_close(gradient, slow_gradient, rtol=1e-6, atol=1e-8)
    assert torch.isfinite(gradient).all()


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_input_is_computed_in_float32(loss, dtype):
    z = random_states(2, 12, 16).to(dtype)
    value, gradient = value_and_gradient(loss, z)
    exact, exact_gradient = value_and_gradient(loss, z.double())
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=2e-6)
    near = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    largest = float(exact_gradient.abs().max())
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=near, atol=near * largest)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(z)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, value, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["highest", "high"])  # high: products in TF32
def test_model_sized_states_on_a_gpu(loss, precision, dtype):
    # A common direction as strong as the rest, as in a trained model.
    z = (random_states(1, 1, 256, seed=1) + random_states(3, 300, 256)).to(dtype)
    wanted, wanted_gradient = value_and_gradient(loss, z.double())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        value, gradient = value_and_gradient(loss, z.cuda())
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(value.double().cpu(), wanted, rtol=1e-5, atol=1e-5)
    off = (gradient.double().cpu() - wanted_gradient).norm() / wanted_gradient.norm()
    assert off < (1e-4 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("mask", [None, torch.tensor([[1] * 6 + [0], [1] * 7, [1] * 7]).bool()])
def test_cross_domain(mask):
    z, given = random_states(3, 7, 5), {"domains": torch.tensor([4, 2, 4]), "mask": mask}
    value, gradient = value_and_gradient(losses.cross_domain_push_away, z, **given)
    slow_value, slow_gradient = value_and_gradient(slow_losses.cross_domain_push_away, z, **given)
    torch.testing.assert_close(value, slow_value)
    torch.testing.assert_close(gradient, slow_gradient)
    stacked = losses.cross_domain_push_away(torch.stack([z, 2 * z.flip(1)]), **given)
    apart = [losses.cross_domain_push_away(x, **given) for x in (z, 2 * z.flip(1))]
    torch.testing.assert_close(stacked, torch.stack(apart))
    value, gradient = value_and_gradient(losses.cross_domain_push_away, z, domains=torch.zeros(3))
    assert value == 0
    assert (gradient == 0).all()


def test_values_that_can_be_checked_by_hand():
    corner, same = torch.eye(4).unsqueeze(0), torch.ones(1, 4, 3)
    for loss, states, wanted in (
        (losses.push_away, corner, -1.0),
        (losses.push_away, same, 0.0),
        (losses.angular_spread, corner, -0.5),
        (losses.angular_spread, same, 0.0),
        (losses.orthogonalization, corner, 0.0),
        (losses.orthogonalization, same, 0.25),
        (partial(losses.l2_repel, norm_weight=0.0), corner, -2.0),
        (partial(losses.l2_repel, norm_weight=0.5), same, 0.5),
        (partial(losses.l2_repel, norm_weight=0.0), 100 * corner, -20000.0),
        (partial(losses.angular_spread, released=True), same, 0.01 - 0.23005345),
        (partial(losses.angular_spread, released=0.1), same, 0.01 - 0.14356629),
        (partial(losses.orthogonalization, released=True), same, 0.07287114),
        (partial(losses.l2_repel, released=True, norm_weight=0.0), 100 * corner, -1.376294),
        (losses.decorrelation, torch.tensor([[[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]]), 1.0),
    ):
        assert loss(states).item() == pytest.approx(wanted, rel=1e-5, abs=1e-3), loss


def condensed(*shape):
    """Vectors about one long direction: all cosines above 0.99."""
    return 30 * random_states(1, 1, shape[-1], seed=1) + random_states(*shape, seed=2)


@pytest.mark.parametrize("cut", [True, 0.1])
def test_beyond_its_cut_the_released_angular_spread_is_a_constant_that_pushes_away(cut):
    """Its value says nothing then; its gradient is that of the mean cosine of z / (|z| + 0.01), scaled."""
    z, tau = condensed(2, 12, 8), 0.5
    bound = 1 - (0.25 if cut is True else cut)
    value, gradient = value_and_gradient(losses.angular_spread, z, tau=tau, released=cut)
    constant = -math.acos(bound) / math.pi / tau + 0.01
    assert float(value) == pytest.approx(constant, rel=1e-12)

    def mean_cosine(z):
        u = z / (z.norm(dim=-1, keepdim=True) + 0.01)
        pairs = ~torch.eye(12, dtype=torch.bool)
        return (u @ u.mT)[:, pairs].mean()

    slope = 1 / (math.pi * tau * math.sqrt(1 - bound**2))
    _, pushed = value_and_gradient(mean_cosine, z)
    torch.testing.assert_close(gradient, slope * pushed, rtol=1e-9, atol=1e-12)


def test_the_released_orthogonalization_of_parallel_vectors_is_that_of_its_cut():
    short = 0.5 - math.acos(0.75) / math.pi
    value = losses.orthogonalization(condensed(1, 9, 8), released=True)
    assert float(value) == pytest.approx(short**2, rel=1e-12)


def test_the_released_l2_repel_of_distant_points_is_the_norm_alone():
    """Each point's distance to itself remains: log(n / n^2) and the epsilon, whatever the others do."""
    z = 50 * random_states(2, 16, 32)
    value, gradient = value_and_gradient(losses.l2_repel, z, released=True)
    norm = 0.1 * z.square().mean()
    assert float(value) == pytest.approx(float(norm) - math.log(16) + 0.01, rel=1e-12)
    torch.testing.assert_close(gradient, 0.2 * z / z.numel(), rtol=1e-9, atol=1e-15)


def test_the_released_decorrelation_is_numpys_correlation_of_tokens():
    z = random_states(1, 7, 40)
    squares = np.corrcoef(z[0].numpy()) ** 2
    wanted = (squares.sum() - 7) / 42
    assert float(losses.decorrelation(z, released=True)) == pytest.approx(wanted, rel=1e-9)
    features = np.corrcoef(z[0].numpy().T) ** 2
    wanted = (features.sum() - 40) / (40 * 39)
    assert float(losses.decorrelation(z)) == pytest.approx(wanted, rel=1e-9)


def test_a_small_dispersion_keeps_its_digits():
    """float32 sums over thousands of nearly parallel vectors; the naive sum is off by 4e-5."""
    z = random_states(1, 1, 64, seed=6) + 1e-3 * random_states(1, 5000, 64, seed=7)
    exact = -losses.push_away(z)
    assert float(exact) < 2e-6
    assert abs(-losses.push_away(z.float()).double() - exact) < 1e-7


@every_loss
def test_blocks_do_not_show(loss):
    """More tokens than a block of rows or a chunk of sums, and odd numbers of them."""
    z = random_states(2, 301, 5)
    value, gradient = value_and_gradient(loss, z)
    if loss is VARIANTS["l2_repel median"]:
        return  # its evenly spaced points depend on the order
    order = torch.randperm(301, generator=torch.Generator().manual_seed(3))
    shuffled, shuffled_gradient = value_and_gradient(loss, z[:, order])
    torch.testing.assert_close(shuffled, value)
    torch.testing.assert_close(shuffled_gradient, gradient[:, order])
    step = 1e-6 * random_states(2, 301, 5, seed=4)
    rise = loss(z + step) - loss(z - step)
    torch.testing.assert_close(rise / 2, (gradient * step).sum(), rtol=1e-5, atol=1e-13)


@every_form
def test_padding_content_never_matters(loss):
    z, given = cases()["padded"]
    value, gradient = value_and_gradient(loss, z, **given)
    for content in (0.0, 1e30, float("nan"), float("inf")):
        dirty = z.masked_fill(~given["mask"].unsqueeze(-1), content)
        again, again_gradient = value_and_gradient(loss, dirty, **given)
        torch.testing.assert_close(again, value, rtol=0, atol=0)
        torch.testing.assert_close(again_gradient, gradient, rtol=0, atol=0)
    assert (gradient[~given["mask"]] == 0).all()


@every_form
def test_non_finite_states_are_not_hidden(loss):
    for bad in (float("nan"), float("inf")):
        z = random_states(2, 5, 4)
        z[1, 2, 3] = bad
        assert torch.isnan(loss(z)), bad


@every_form
def test_a_stack_of_layers_gives_each_layers_loss(loss):
    layers = random_states(3, B, T, D)
    _, given = cases()["packed and padded"]
    stacked = loss(layers, **given)
    torch.testing.assert_close(stacked, torch.stack([loss(z, **given) for z in layers]))


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor):
                self.numbers = max(self.numbers, value.numel())
        return out


@every_loss
def test_memory_is_linear_in_the_tokens(loss):
    peaks = []
    for t in (1024, 2048):
        with Largest() as largest:
            value_and_gradient(loss, random_states(1, t, 8, dtype=torch.float32))
        peaks.append(largest.numbers)
    assert peaks[1] <= 2.05 * peaks[0]
    assert peaks[1] < 2048 * 2048 / 8


def test_sampling_has_its_own_generator_and_takes_real_tokens_only():
    z = random_states(2, 50, 4)
    mask = torch.zeros(2, 50, dtype=torch.bool)
    mask[:, 10:30] = True
    drawn = partial(losses.angular_spread, mask=mask, max_tokens=7)
    before = torch.random.get_rng_state()
    touched = torch.zeros(50, dtype=torch.bool)
    generator = torch.Generator().manual_seed(1)
    values = []
    for _ in range(30):
        value, gradient = value_and_gradient(drawn, z, generator=generator)
        used = (gradient != 0).any(-1)
        assert used.sum(-1).tolist() == [7, 7]
        assert not (used[0] == used[1]).all()  # each row has its own draw
        touched |= used.any(0)
        values.append(float(value))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(touched, mask[0])
    assert len(set(values)) > 25
    repeat = drawn(z, generator=torch.Generator().manual_seed(1))
    assert float(repeat) == pytest.approx(values[0], abs=1e-12)
    everything = losses.angular_spread(z, max_tokens=50)
    torch.testing.assert_close(everything, losses.angular_spread(z), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda z: losses.push_away(z[0]), GeometryError, "(b, t, d)"),
        (lambda z: losses.push_away(z.long()), GeometryError, "int64"),
        (lambda z: losses.push_away(z[:, :0]), GeometryError, "at least one token"),
        (
            lambda z: losses.angular_spread(z, mask=torch.ones(2, 4)),
            GeometryError,
            "(2, 5), got (2, 4)",
        ),
        (
            lambda z: losses.angular_spread(z, segments=torch.ones(2, 4)),
            GeometryError,
            "`segments`",
        ),
        (lambda z: losses.angular_spread(z, tau=0.0), UsageError, "at least 0.02, got 0.0"),
        (
            lambda z: losses.angular_spread(z, pairs="rows"),
            UsageError,
            "sequence or batch, got 'rows'",
        ),
        (lambda z: losses.angular_spread(z, max_tokens=1), UsageError, "at least 2, got 1"),
        (lambda z: losses.orthogonalization(z, margin=0.0), UsageError, "(0, 1], got 0.0"),
        (lambda z: losses.l2_repel(z, tau=-1.0), UsageError, "got -1.0"),
        (
            lambda z: losses.l2_repel(z, tau="median", released=True),
            UsageError,
            "a number as tau with released, got 'median'",
        ),
        (lambda z: losses.angular_spread(z, released=1.5), UsageError, "cosines are cut, got 1.5"),
        (lambda z: losses.l2_repel(z, tau="mean"), UsageError, "got 'mean'"),
        (lambda z: losses.l2_repel(z, norm_weight=-1), UsageError, "got -1"),
        (
            lambda z: losses.decorrelation(z, axis="rows"),
            UsageError,
            "features or tokens, got 'rows'",
        ),
        (
            lambda z: losses.cross_domain_push_away(z, domains=torch.ones(3)),
            GeometryError,
            "got (3,)",
        ),
        (
            lambda z: losses.push_away(z, pairs="sequence", across_ranks=True),
            UsageError,
            "across_ranks",
        ),
        (lambda z: losses.push_away(z, across_ranks=True), UsageError, "torchrun"),
    ],
)
def test_errors_say_expected_given_and_next_step(call, error, said):
    with pytest.raises(error) as caught:
        call(torch.randn(2, 5, 4))
    assert said in str(caught.value)


def test_modules_hold_options_and_repeat_their_draws():
    z, domains = random_states(2, 40, 4), torch.tensor([0, 1])
    loss = DispersionLoss("angular_spread", tau=0.5, max_tokens=8, seed=3)
    first, second = float(loss(z)), float(loss(z))
    assert first != second
    loss.calls = 1
    assert float(loss(z)) == second
    for name, function in LOSSES.items():
        options = {"domains": domains} if name == "cross_domain_push_away" else {}
        assert float(DispersionLoss(name)(z, **options)) == float(function(z, **options)), name
    in_sequences = float(losses.squeeze(z, pairs="sequence"))
    assert float(DispersionLoss("squeeze", pairs="sequence")(z)) == in_sequences


def own_loss(z, *, mask=None, segments=None, pull=1.0):
    """One layer's states (b, t, d) -> a scalar, by plain autograd."""
    assert segments is None
    return pull * (z if mask is None else z[mask]).square().mean()


class OwnModule(torch.nn.Module):
    def forward(self, z, mask, **_):
        return own_loss(z, mask=mask)


@pytest.mark.parametrize(("loss", "name"), [(own_loss, "own_loss"), (OwnModule(), "OwnModule")])
def test_a_function_of_ones_own_is_a_loss_a_layer(loss, name):
    layers, mask = random_states(3, B, T, D), cases()["padded"][1]["mask"]
    module = DispersionLoss(loss)
    alone = [own_loss(z, mask=mask) for z in layers]
    torch.testing.assert_close(module(layers, mask=mask), torch.stack(alone))
    torch.testing.assert_close(module(layers[0], mask=mask), alone[0])
    assert module.name == name


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda z: DispersionLoss(lambda z: z.mean()),
            UsageError,
            "got <lambda> without mask and seg",
        ),
        (
            lambda z: DispersionLoss(own_loss, push=2.0),
            UsageError,
            "own_loss (pull), got 'push'",
        ),
        (
            lambda z: DispersionLoss(lambda z, **_: z.mean(-1))(z),
            GeometryError,
            "a scalar from <lambda>",
        ),
    ],
)
def test_a_function_that_is_no_loss_is_refused(call, error, said):
    with pytest.raises(error) as caught:
        call(random_states(2, B, T, D))
    assert said in str(caught.value)


def test_the_loss_in_contributing_is_one():
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")
    (code,) = re.findall(r"^ {6}(def mean_square.*?)^- ", text, re.M | re.S)
    space = vars(losses).copy()
    exec(re.sub(r"^ {6}", "", code, flags=re.M), space)
    z, given = cases()["packed and padded"]
    groups = slow_losses.groups(z, given["mask"], given["segments"])
    wanted = torch.stack([torch.stack(points).square().mean() for points in groups]).mean()
    torch.testing.assert_close(space["mean_square"](z, **given), wanted)
    test_non_finite_states_are_not_hidden(space["mean_square"])
