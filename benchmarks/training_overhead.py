"""The cost of a dispersion loss beside a training step of GPT-2-small's shape.

    python benchmarks/training_overhead.py                      # CPU, one thread: minutes
    python benchmarks/training_overhead.py --device cuda        # GPU, bf16 autocast
    python benchmarks/training_overhead.py --losses push_away,angular_spread

4 x 512 tokens, loss on all layers, AdamW step included; each loss once with 256 sampled tokens a sequence and
once with all. Printed is 1 + (time of loss and gradient on the step's own hidden states) / (time of the step
without), medians: other work on the machine moves a step of 20 s by more than 1 %. Time is that of the
processor on a CPU, wall clock between synchronisations on a GPU.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shared import parsed
from lmeval_dispersion.training.losses import LOSSES, DispersionLoss
from lmeval_dispersion.training.regularizer import DispersionRegularizer, Layout

TOKENS = (256, None)  # sampled, all


class Bench:
    """One model and its optimiser; the hooks are attached by `regularizer`."""

    def __init__(self, args) -> None:
        self.args, self.cuda = args, args.device == "cuda"
        torch.manual_seed(0)
        config = GPT2Config(n_layer=args.layers, loss_type="ForCausalLM", use_cache=False)
        self.model = GPT2LMHeadModel(config).to(args.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.ids = torch.randint(0, 50257, (args.batch, args.length), device=args.device)
        self.domains = torch.arange(args.batch, device=args.device) % 2
        self.autocast = torch.autocast(args.device, dtype=torch.bfloat16, enabled=self.cuda)
        self.hooks: DispersionRegularizer | None = None

    def regularizer(self, loss: str, max_tokens: int | None) -> DispersionRegularizer:
        """The hooks, now with this loss."""
        self.hooks = self.hooks or DispersionRegularizer(self.model, layers="all", weight=0.1)
        self.hooks.loss = DispersionLoss(loss, **({"max_tokens": max_tokens} if max_tokens else {}))
        return self.hooks

    def step(self) -> None:
        """One without a loss."""
        with self.autocast:
            loss = self.model(self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, work) -> float:
        if not self.cuda:
            start = time.process_time()
            work()
            return time.process_time() - start
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def states(self) -> list[torch.Tensor]:
        with torch.no_grad(), self.autocast:
            out = self.model(self.ids, output_hidden_states=True)
        return [h.detach().requires_grad_() for h in out.hidden_states[1:]]


def alone(bench: Bench, reg: DispersionRegularizer, leaves: list[torch.Tensor], repeats: int) -> float:
    """Median seconds of loss and gradient on given states, gradients added to ones already there."""
    reg._described = {"domains": bench.domains}

    def work() -> None:
        (reg._losses(leaves, Layout(None, None)).mean() * reg.weight).backward()

    for _ in range(2):
        work()
    return statistics.median(bench.timed(work) for _ in range(repeats))


def main() -> None:
    args = parsed(
        __doc__,
        ("--device", {"default": "cpu", "choices": ["cpu", "cuda"]}),
        ("--layers", {"type": int, "default": 12}),
        ("--batch", {"type": int, "default": 4}),
        ("--length", {"type": int, "default": 512}),
        ("--repeats", {"type": int, "default": 5}),
        ("--losses", {"default": ",".join(LOSSES), "help": "losses to measure, comma-separated"}),
    )
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU, 1 thread"
    shape = f"{args.layers} layers, {args.batch}x{args.length}"
    print(f"{name}; torch {torch.__version__}; GPT-2 small shape, {shape}; load {os.getloadavg()[0]:.1f}")
    bench = Bench(args)
    bench.step()
    base = [bench.timed(bench.step) for _ in range(args.repeats)]
    middle = statistics.median(base)
    print(f"step without a loss: {middle * 1e3:.1f} ms ({min(base) * 1e3:.1f} to {max(base) * 1e3:.1f})")
    leaves = bench.states()
    print(f"{'loss':24} {'tokens':>6} {'cost':>8}")
    for loss in args.losses.split(","):
        for tokens in TOKENS:
            cost = 1 + alone(bench, bench.regularizer(loss, tokens), leaves, args.repeats) / middle
            print(f"{loss:24} {tokens or args.length:>6} {cost:8.4f}", flush=True)


if __name__ == "__main__":
    main()
