"""The same losses on a GPU: value and gradient as on the CPU, TF32 or not, stacked layers, NaN found late."""

import pytest
import torch
from loss_cases import VARIANTS, random_states, value_and_gradient
from tiny_decoders import tiny_gpt2, tokens

from lmeval_dispersion.errors import NonFiniteLossError
from lmeval_dispersion.training import losses
from lmeval_dispersion.training.regularizer import DispersionRegularizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_model_sized_states(variant, tf32, dtype):
    name, options = VARIANTS[variant]
    # A common direction as strong as the rest, as in a trained model.
    z = (random_states(1, 1, 256, seed=1) + random_states(3, 300, 256)).to(dtype)
    wanted, wanted_gradient = value_and_gradient(getattr(losses, name), z.double(), **options)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        value, gradient = value_and_gradient(getattr(losses, name), z.cuda(), **options)
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(value.double().cpu(), wanted, rtol=1e-5, atol=1e-5)
    off = (gradient.double().cpu() - wanted_gradient).norm() / wanted_gradient.norm()
    assert off < (1e-4 if dtype == torch.float32 else 5e-3)


def test_nan_is_found_at_a_later_step():
    model, ids = tiny_gpt2().cuda(), tokens().cuda()
    reg = DispersionRegularizer(model, layers="all")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.bias[3] = float("nan")
    model(ids)
    reg.pop()
    torch.cuda.synchronize()
    model(ids)
    with pytest.raises(NonFiniteLossError, match=r"layer\.1, forward pass 0"):
        reg.pop()
