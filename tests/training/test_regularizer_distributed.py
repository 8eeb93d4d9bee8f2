"""DDP and FSDP2 on two gloo ranks give the gradient of one process with the whole batch."""

from pathlib import Path

import pytest
import torch
from processes import torchrun
from tiny_decoders import assert_same_gradients, gradients, tiny_gpt2, tokens

from lmeval_dispersion.training.regularizer import DispersionRegularizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(2, Path(__file__).parent / "distributed_worker.py", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
@pytest.mark.parametrize(
    ("case", "loss", "options"),
    [
        ("sequence pairs", "angular_spread", {"layers": "all"}),
        ("pairs across ranks", "push_away", {"layers": "last"}),
    ],
)
def test_two_ranks_equal_one_process(results, wrapper, case, loss, options):
    model, ids = tiny_gpt2(), tokens(4, 10)
    reg = DispersionRegularizer(model, loss, weight=0.5, **options)
    loss_value = model(ids, labels=ids).loss
    aux = reg.pop()
    (loss_value + aux).backward()
    value, found = results[f"{case}, {wrapper}"]
    if case == "pairs across ranks":
        assert value == pytest.approx(float(aux.detach()), abs=1e-6)  # every rank has the whole loss
    assert_same_gradients(found, gradients(model), rtol=1e-4, atol=1e-6)
    # Pairs within ranks only would be another loss: the test can fail.
    if case == "pairs across ranks":
        parts = []
        for part in (ids[:2], ids[2:]):
            model(part)
            parts.append(float(reg.pop().detach()))
        assert abs(sum(parts) / 2 - value) > 1e-4
