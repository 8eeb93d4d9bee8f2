"""The cost of a dispersion loss: a training step with it over one without it, in pairs, in one run.

    python benchmarks/training_overhead.py --repeats 3
    python benchmarks/training_overhead.py --device cuda --repeats 20

GPT-2-small's shape, the loss on all 12 layers, the optimizer's step included; bfloat16 autocast on a GPU,
float32 and one thread on a CPU. The figure is the median of (step with the loss) / (step without), the two
right after each other in alternating order: CPU time on a CPU, wall time between synchronisations on a GPU.
Each loss runs once on 256 sampled tokens of each sequence and once on all.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks.shared import parsed  # noqa: E402


class Trainee:
    """A model with its optimizer, and the hooks of a loss if it has one."""

    def __init__(self, device: str, loss: str | None, max_tokens: int | None) -> None:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        from lmeval_dispersion import DispersionRegularizer
        from lmeval_dispersion.training.losses import DispersionLoss

        torch.manual_seed(0)
        config = GPT2Config(use_cache=False)
        config.loss_type = "ForCausalLM"
        self.device = device
        self.model = GPT2LMHeadModel(config).to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.hooks = None
        if loss is not None:
            options = {} if max_tokens is None else {"max_tokens": max_tokens}
            self.hooks = DispersionRegularizer(
                self.model, DispersionLoss(loss, **options), layers="all", weight=0.1
            )

    def step(self, tokens: Any) -> float:
        """Seconds of one training step."""
        import torch

        on_gpu = self.device == "cuda"
        clock = time.perf_counter if on_gpu else time.process_time
        if on_gpu:
            torch.cuda.synchronize()
        start = clock()
        if self.hooks is not None and self.hooks.loss.needs_domains:
            self.hooks.describe(domains=torch.arange(len(tokens), device=self.device) % 2)
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=on_gpu):
            loss = self.model(tokens, labels=tokens).loss
        if self.hooks is not None:
            loss = loss + self.hooks.pop()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        return clock() - start


def ratios(plain: Trainee, hooked: Trainee, tokens: Any, repeats: int) -> list[float]:
    """Ratios of neighbouring steps, in alternating order, after two of each that warm up."""
    made = []
    for repeat in range(-2, repeats):
        if repeat % 2:
            with_loss = hooked.step(tokens)
            without = plain.step(tokens)
        else:
            without = plain.step(tokens)
            with_loss = hooked.step(tokens)
        if repeat >= 0:
            made.append(with_loss / without)
    return made


def main() -> None:
    """Print a line for each loss."""
    arguments = parsed(
        __doc__,
        ("--device", {"choices": ["cpu", "cuda"], "default": "cpu"}),
        ("--batch", {"type": int, "default": 4}),
        ("--length", {"type": int, "default": 512}),
        ("--repeats", {"type": int, "default": 3}),
        ("--losses", {"nargs": "+", "help": "default: all"}),
    )
    import torch

    from lmeval_dispersion.training.losses import LOSSES

    if arguments.device == "cpu":
        torch.set_num_threads(1)
    tokens = torch.randint(0, 50_257, (arguments.batch, arguments.length), device=arguments.device)
    plain = Trainee(arguments.device, None, None)
    for loss in arguments.losses or LOSSES:
        for max_tokens in (256, None):
            hooked = Trainee(arguments.device, loss, max_tokens)
            made = sorted(ratios(plain, hooked, tokens, arguments.repeats))
            sampled = f"{max_tokens or 'all'} of {arguments.length} tokens"
            median = statistics.median(made)
            print(
                f"{loss:24} {sampled:20} {median:.4f} ({made[0]:.4f} to {made[-1]:.4f})", flush=True
            )
            hooked.hooks.detach()
            del hooked


if __name__ == "__main__":
    main()
