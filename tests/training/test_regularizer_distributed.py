"""DDP and FSDP2 on two gloo ranks give the gradient of one process with the whole batch.

Under torchrun this file is one of the ranks, and saves what rank 0 has in the folder that it is given.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import torchrun
from tiny_decoders import assert_same_gradients, gradients, tiny_gpt2, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lmeval_dispersion.training.regularizer import DispersionRegularizer

pytestmark = pytest.mark.slow
CASES = {
    "sequence pairs": ("angular_spread", {"layers": "all"}),
    "pairs across ranks": ("push_away", {"layers": "last", "across_ranks": True}),
}


def fsdp2(model):
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {"DDP": DistributedDataParallel, "FSDP2": fsdp2}


def value_and_gradients(model, ids, loss, **options):
    with DispersionRegularizer(model, loss, weight=0.5, **options) as reg:
        ce = model(ids, labels=ids).loss
        aux = reg.pop()
        (ce + aux).backward()
    return float(aux.detach()), {
        name.removeprefix("module."): grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in gradients(model).items()
    }


def one_of_two_ranks(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ids = tokens(4, 10)[2 * rank : 2 * rank + 2]
    results = {
        (case, name): value_and_gradients(wrap(tiny_gpt2()), ids, loss, **options)
        for case, (loss, options) in CASES.items()
        for name, wrap in WRAPPERS.items()
    }
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(2, __file__, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(results, wrapper, case):
    loss, options = CASES[case]
    one_process = {"layers": options["layers"]}
    wanted, wanted_gradients = value_and_gradients(tiny_gpt2(), tokens(4, 10), loss, **one_process)
    value, summed = results[case, wrapper]
    assert_same_gradients(summed, wanted_gradients, rtol=1e-4, atol=1e-6)
    if case == "pairs across ranks":
        assert value == pytest.approx(wanted, abs=1e-6)  # every rank has the whole loss
        # Pairs within ranks only would be another loss: the test can fail.
        halves = [
            value_and_gradients(tiny_gpt2(), part, loss, **one_process)[0]
            for part in tokens(4, 10).split(2)
        ]
        assert abs(sum(halves) / 2 - value) > 1e-4


if __name__ == "__main__":
    torch.set_num_threads(1)
    one_of_two_ranks(Path(sys.argv[1]))
