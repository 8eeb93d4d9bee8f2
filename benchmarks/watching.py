"""The cost of watching a training run at the Trainer's default interval of logs, 500 steps, and to one step.

    OMP_NUM_THREADS=1 python benchmarks/watching.py [--width 512 --layers 8 --vocabulary 49152]

A Llama of random weights trains on batches of random tokens; steps and measurements alternate in one process.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shared import parsed
from lmeval_dispersion import watch
from lmeval_dispersion.installation import data_folder

INTERVAL = 500


def main():
    shape = {"width": 512, "layers": 8, "vocabulary": 49_152, "batch": 4, "tokens": 256, "pairs": 5}
    args = parsed(__doc__, *((f"--{name}", {"type": int, "default": size}) for name, size in shape.items()))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.width,
            intermediate_size=3 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
        )
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randint(args.vocabulary, (args.batch, args.tokens))
    # The rows beyond the demo's tokenizer are padding, as many models have it.
    tokenizer = AutoTokenizer.from_pretrained(data_folder("demo") / "sums-45")
    watcher = watch(model, tokenizer, domains=["math"])

    def train():
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def gap():
        watcher.gaps()

    jobs = {"step": train, "measurement": lambda: watcher.measure(1), "of it G": gap}
    times = {name: [] for name in jobs}
    for _ in range(args.pairs + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{count:.0f}M parameters, {args.batch} x {args.tokens} tokens a step, {args.pairs} pairs")
    for name, values in times.items():
        values = values[1:]
        print(f"  {name:<12} {min(values):.4f} to {max(values):.4f} s")
    ratio = statistics.median(b / a for a, b in zip(times["step"][1:], times["measurement"][1:], strict=True))
    share = 100 * ratio / INTERVAL
    print(f"  measurement / step: {ratio:.3f}; at every {INTERVAL} steps {share:.4f} % of the run")


if __name__ == "__main__":
    main()
