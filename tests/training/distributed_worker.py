"""One of two gloo ranks: gradients of a regularized model under DDP and FSDP2, saved by rank 0.

Run as ``torchrun --nproc-per-node 2 distributed_worker.py FOLDER``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_decoders import tiny_gpt2, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lmeval_dispersion.training.regularizer import DispersionRegularizer

CASES = {
    "sequence pairs": ("angular_spread", {"layers": "all"}),
    "pairs across ranks": ("push_away", {"layers": "last", "across_ranks": True}),
}


def ddp(model):
    return DistributedDataParallel(model)


def fsdp2(model):
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients_of(model):
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            found[name.removeprefix("module.")] = grad.detach().clone()
    return found


def main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ids = tokens(4, 10)[2 * rank : 2 * rank + 2]
    results = {}
    for case, (loss, options) in CASES.items():
        for name, wrap in {"DDP": ddp, "FSDP2": fsdp2}.items():
            model = wrap(tiny_gpt2())
            with DispersionRegularizer(model, loss, weight=0.5, **options) as reg:
                out = model(ids, labels=ids)
                aux = reg.pop()
                (out.loss + aux).backward()
            results[f"{case}, {name}"] = (float(aux.detach()), gradients_of(model))
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
