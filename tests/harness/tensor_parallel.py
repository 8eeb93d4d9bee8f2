"""One process of two that hold a model between them: run by torchrun in `test_full_size.py`.

torchrun ... tensor_parallel.py FOLDER_OF_NUMBERS dispersion-arguments ...
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lmeval_dispersion.cli import main
from lmeval_dispersion.model.capture import Site


def check() -> None:
    """The command's exit code, then a state in pieces."""
    code = main(sys.argv[2:])
    # A plan that keeps states in pieces, along the tokens, as sequence parallelism does.
    mesh = init_device_mesh("cpu", (2,))
    state = torch.arange(2 * 6 * 4, dtype=torch.float32).reshape(2, 6, 4)
    seen: list[torch.Tensor] = []
    module = nn.Identity()
    Site("norm", module, "output").hook(seen.append)
    module(distribute_tensor(state, mesh, [Shard(1)]))
    assert type(seen[0]) is torch.Tensor
    assert torch.equal(seen[0], state)
    with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
        file.write(str(code))


if __name__ == "__main__":  # collecting doctests imports this
    check()
