"""What must not change a loss: order, padding, packing, scale, blocks; and memory linear in the tokens."""

import pytest
import torch
from loss_cases import VARIANTS, B, D, T, cases, random_states, value_and_gradient
from torch.utils._python_dispatch import TorchDispatchMode

from lmeval_dispersion.training import losses


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_do_not_show(variant):
    """More tokens than a block of rows or a chunk of sums, and odd numbers of them."""
    name, options = VARIANTS[variant]
    z = random_states(2, 301, 5)
    value, gradient = value_and_gradient(getattr(losses, name), z, **options)
    order = torch.randperm(301, generator=torch.Generator().manual_seed(3))
    if "median" not in variant:  # its evenly spaced points depend on the order
        shuffled, shuffled_gradient = value_and_gradient(getattr(losses, name), z[:, order], **options)
        torch.testing.assert_close(shuffled, value)
        torch.testing.assert_close(shuffled_gradient, gradient[:, order])
    step = 1e-6 * random_states(2, 301, 5, seed=4)
    rise = getattr(losses, name)(z + step, **options) - getattr(losses, name)(z - step, **options)
    if "median" not in variant:
        torch.testing.assert_close(rise / 2, (gradient * step).sum(), rtol=1e-5, atol=1e-13)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_content_never_matters(variant):
    name, options = VARIANTS[variant]
    z, given = cases()["padded"]
    value, gradient = value_and_gradient(getattr(losses, name), z, **given, **options)
    for content in (0.0, 1e30, float("nan"), float("inf")):
        dirty = z.masked_fill(~given["mask"].unsqueeze(-1), content)
        again, again_gradient = value_and_gradient(getattr(losses, name), dirty, **given, **options)
        torch.testing.assert_close(again, value, rtol=0, atol=0)
        torch.testing.assert_close(again_gradient, gradient, rtol=0, atol=0)
    assert (gradient[~given["mask"]] == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stack_of_layers_gives_each_layers_loss(variant):
    name, options = VARIANTS[variant]
    layers = random_states(3, B, T, D)
    mask = cases()["packed and padded"][1]["mask"]
    segments = cases()["packed"][1]["segments"]
    stacked = getattr(losses, name)(layers, mask=mask, segments=segments, **options)
    apart = [getattr(losses, name)(z, mask=mask, segments=segments, **options) for z in layers]
    torch.testing.assert_close(stacked, torch.stack(apart))


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor):
                self.numbers = max(self.numbers, value.numel())
        return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_is_linear_in_the_tokens(variant):
    name, options = VARIANTS[variant]
    peaks = []
    for t in (1024, 2048):
        with Largest() as largest:
            value_and_gradient(getattr(losses, name), random_states(1, t, 8, dtype=torch.float32), **options)
        peaks.append(largest.numbers)
    assert peaks[1] <= 2.05 * peaks[0]
    assert peaks[1] < 2048 * 2048 / 8
