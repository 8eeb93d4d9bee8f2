"""What a dispersion loss costs: a training step with it over one without it, side by side in one run.

    python benchmarks/training_overhead.py                      # CPU, one thread: minutes
    python benchmarks/training_overhead.py --device cuda        # GPU, bf16 autocast
    python benchmarks/training_overhead.py --paired push_away,angular_spread --memory

GPT-2-small shape, 4 x 512 tokens, loss on all layers, AdamW step included. Two figures a loss, each once
with 256 sampled tokens a sequence and once with all 512:

- ``paired``: median over repeats of (step with the loss) / (step without), the two run right after each
  other in alternating order. CPU time on a CPU, wall clock between synchronisations on a GPU.
- ``alone``: 1 + (time of loss and gradient on the step's own hidden states) / (time of the step without).
On a
  CPU this is the sharper one: other work on the machine moves a step of 20 s by more than 1 %.

``memory`` is the peak of allocated memory on a GPU, of the process's resident memory (own process a case)
on a CPU, over the peak without the loss.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lmeval_dispersion.training.losses import LOSSES, DispersionLoss
from lmeval_dispersion.training.regularizer import DispersionRegularizer, Layout

TOKENS = (256, None)  # sampled, all


class Bench:
    """One model for steps without a loss, another with the hooks; on a CPU, short of memory, the same."""

    def __init__(self, args):
        self.cuda = args.device == "cuda"
        self.args = args
        self.plain, self.hooked = self.trainee(), None
        self.ids = torch.randint(0, 50257, (args.batch, args.length), device=args.device)
        self.domains = torch.arange(args.batch, device=args.device) % 2
        self.autocast = torch.autocast(args.device, dtype=torch.bfloat16, enabled=self.cuda)

    def trainee(self, reg=False):
        torch.manual_seed(0)
        config = GPT2Config(n_layer=self.args.layers, loss_type="ForCausalLM", use_cache=False)
        model = GPT2LMHeadModel(config).to(self.args.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        hooks = DispersionRegularizer(model, layers="all", weight=0.1) if reg else None
        return (torch.compile(model) if self.args.compile else model), optimizer, hooks

    def regularizer(self, loss, max_tokens):
        """The hooks, now with this loss; attached before the model is compiled."""
        if self.hooked is None:
            if self.cuda:
                self.hooked = self.trainee(reg=True)
            else:
                model, optimizer, _ = self.plain
                self.hooked = model, optimizer, DispersionRegularizer(model, layers="all", weight=0.1)
        reg = self.hooked[2]
        reg.loss = DispersionLoss(loss, **({"max_tokens": max_tokens} if max_tokens else {}))
        return reg

    def step(self, with_loss=False):
        model, optimizer, reg = self.hooked if with_loss else self.plain
        if with_loss and reg.loss.needs_domains:
            reg.describe(domains=self.domains)
        with self.autocast:
            loss = model(self.ids, labels=self.ids).loss
        if with_loss:
            loss = loss + reg.pop()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(self, work):
        if self.cuda:
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            return time.perf_counter() - start
        start = time.process_time()
        work()
        return time.process_time() - start

    def states(self):
        with torch.no_grad(), self.autocast:
            out = self.plain[0](self.ids, output_hidden_states=True)
        return [h.detach().requires_grad_() for h in out.hidden_states[1:]]


def quartiles(values):
    values = sorted(values)
    return values[len(values) // 4], values[(3 * len(values)) // 4]


def paired(bench, repeats):
    """Ratios of neighbouring steps, in alternating order."""
    ratios, order = [], [False, True]
    for _ in range(repeats):
        seconds = {w: bench.timed(lambda w=w: bench.step(w)) for w in order}
        order.reverse()
        ratios.append(seconds[True] / seconds[False])
    return ratios


def alone(bench, reg, leaves, repeats):
    """Seconds of loss and gradient on given states, gradients added to ones already there."""
    reg._described = {"domains": bench.domains}

    def work():
        (reg._losses(leaves, Layout(None, None)).mean() * reg.weight).backward()

    for _ in range(2):
        work()
    return [bench.timed(work) for _ in range(repeats)]


def gpu_peak(bench, with_loss):
    """Peak bytes of a step, without the other of the two resident models."""
    other = torch.cuda.memory_allocated() / 2
    torch.cuda.reset_peak_memory_stats()
    bench.step(with_loss)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - other


def peak_memory(args, loss, max_tokens):
    """Peak in MB of two steps on a CPU, in a process of its own."""
    code = json.dumps({"loss": loss, "max_tokens": max_tokens})
    command = [
        sys.executable,
        __file__,
        "--child",
        code,
        "--device",
        args.device,
        "--layers",
        str(args.layers),
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(out.stdout.strip().splitlines()[-1])


def child(args):
    import resource

    case = json.loads(args.child)
    bench = Bench(args)
    if case["loss"]:
        bench.regularizer(case["loss"], case["max_tokens"])
    for _ in range(2):
        bench.step(bool(case["loss"]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, help="pairs a loss (CPU 3, GPU 40)")
    parser.add_argument("--paired", default="", help="losses to pair, comma-separated, or all; GPU: all")
    parser.add_argument("--losses", default="", help="losses to measure, comma-separated; default all")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", help="write the rows there too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    if args.child:
        return child(args)
    losses = args.losses.split(",") if args.losses else list(LOSSES)
    cuda = args.device == "cuda"
    pairing = list(LOSSES) if args.paired == "all" or (cuda and not args.paired) else args.paired.split(",")
    repeats = args.repeats or (40 if cuda else 3)
    name = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, 1 thread"
    shape = f"{args.layers} layers, {args.batch}x{args.length}, {'bf16 autocast' if cuda else 'float32'}"
    print(
        f"{name}; torch {torch.__version__}; GPT-2 small shape, {shape}{', compiled' * args.compile}", end=""
    )
    print(f"; load {os.getloadavg()[0]:.1f}")
    plain = peak_memory(args, None, None) if args.memory and not cuda else None
    bench = Bench(args)
    for _ in range(5 if cuda else 1):
        bench.step()
    base = [bench.timed(bench.step) for _ in range(repeats)]
    middle, (low, high) = statistics.median(base), quartiles(base)
    print(f"step without a loss: {middle * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})", flush=True)
    leaves = bench.states()
    rows = []
    print(f"{'loss':24} {'tokens':>6} {'alone':>8} {'paired':>8} {'quartiles':>15} {'memory':>8}")
    for loss in losses:
        for tokens in TOKENS:
            reg = bench.regularizer(loss, tokens)
            work = statistics.median(alone(bench, reg, leaves, repeats if cuda else 5))
            row = {"loss": loss, "tokens": tokens or args.length, "alone_ms": work * 1e3}
            row["alone"] = 1 + work / middle
            cells = ["", "", ""]
            if loss in pairing:
                for _ in range(5 if cuda else 0):
                    bench.step(True)
                ratios = paired(bench, repeats)
                low, high = quartiles(ratios)
                row |= {"paired": statistics.median(ratios), "paired_low": low, "paired_high": high}
                cells[:2] = [f"{row['paired']:.4f}", f"{low:.3f} to {high:.3f}"]
                if plain is not None:
                    row["memory"] = peak_memory(args, loss, tokens) / plain
                elif cuda:
                    row["memory"] = gpu_peak(bench, True) / gpu_peak(bench, False)
                cells[2] = f"{row['memory']:.3f}" if "memory" in row else ""
            rows.append(row)
            line = f"{loss:24} {row['tokens']:>6} {row['alone']:8.4f} {cells[0]:>8} {cells[1]:>15}"
            print(f"{line} {cells[2]:>8}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": name, "base_ms": middle * 1e3, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
