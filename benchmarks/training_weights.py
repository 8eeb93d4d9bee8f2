"""What a weight and a choice of layers do to a model: measured dispersion and perplexity after a few steps.

    python benchmarks/training_weights.py MODEL TEXT
    python benchmarks/training_weights.py MODEL TEXT --loss push_away --weights 0.1,1 --layers last --seeds 0

From the same pretrained weights a few AdamW steps are taken without a loss (the base) and with each weight on
each choice of layers, on the same batches of the seed. Dispersion (mean cosine distance between the tokens of
a held-out block, averaged over blocks) and perplexity are those of held-out blocks from the end of TEXT;
each figure is the difference from the base of the same seed: mean and standard deviation over seeds.

MODEL is a folder or a Hub id, TEXT what `dispersion train --data` takes. bf16 autocast, float32 weights.
"""

import argparse
import json
import math
import statistics
import sys
import time

import torch

from lmeval_dispersion.training.regularizer import DispersionRegularizer
from lmeval_dispersion.training.train import Settings, checked_tokenizer, evaluated, start_model, text_blocks


def trained(model, blocks, args, seed, weight, layers):
    """Take the steps; the dispersion loss is added where ``weight`` is above 0."""
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    order = torch.randperm(len(blocks), generator=draw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    model.train()
    reg = DispersionRegularizer(model, args.loss, layers, weight, seed=seed) if weight else None
    for step in range(args.steps):
        rows = order[[(step * args.batch + i) % len(blocks) for i in range(args.batch)]]
        ids = torch.as_tensor(blocks[rows.numpy()], dtype=torch.long)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        if reg is not None:
            loss = loss + reg.pop()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as transformers' Trainer does
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    if reg is not None:
        reg.detach()


def figures(model, held_out, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = evaluated(model, held_out, batch)
    return {
        "last": found["tokens"][-1],
        "mean": statistics.fmean(found["tokens"]),
        "log_perplexity": math.log(found["perplexity"]),
    }


def told(values, form):
    spread = f" ({format(statistics.stdev(values), form.lstrip('+'))})" if len(values) > 1 else ""
    return format(statistics.fmean(values), form) + spread


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("text", metavar="TEXT")
    parser.add_argument("--loss", default="angular_spread")
    parser.add_argument("--weights", default="0.1,1,10")
    parser.add_argument("--layers", default="last,all", help="choices of layers, one each")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=16, metavar="BLOCKS")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    begun, cpu = time.perf_counter(), time.process_time()
    settings = Settings(args.model, (args.text,), "", block=args.block)
    tokenizer = checked_tokenizer(settings)
    blocks = text_blocks(settings, args.text, tokenizer, 20 * args.steps * args.batch + args.held_out)
    train, held_out = blocks[: -args.held_out], blocks[-args.held_out :]
    model = start_model(settings, 0)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    before = figures(model, held_out, args.batch)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    cases = [(None, 0.0)]
    cases += [(layers, float(w)) for layers in args.layers.split(",") for w in args.weights.split(",")]
    found = {}
    for seed in seeds:
        for layers, weight in cases:
            model.load_state_dict(start)
            trained(model, train, args, seed, weight, layers)
            found[layers, weight, seed] = figures(model, held_out, args.batch)
            print(seed, layers, weight, found[layers, weight, seed], file=sys.stderr, flush=True)
    if args.json:
        rows = [{"layers": k[0], "weight": k[1], "seed": k[2], **v} for k, v in found.items()]
        with open(args.json, "w") as file:
            json.dump({"before": before, "rows": rows}, file, indent=1)
    after = {key: statistics.fmean(found[None, 0.0, seed][key] for seed in seeds) for key in before}
    print(
        f"{args.loss}, {args.steps} steps of {args.batch} x {args.block} tokens, lr {args.lr:g}, "
        f"{len(seeds)} seeds, {args.held_out} held-out blocks; torch {torch.__version__}"
    )
    for name, row in (("before", before), ("base, after", after)):
        print(
            f"{name}: dispersion at the last layer {row['last']:.3f}, mean over layers {row['mean']:.3f}, "
            f"perplexity {math.exp(row['log_perplexity']):.2f}"
        )
    print("\n| layers | weight | dispersion, last layer | mean over layers | perplexity, % |")
    print("|---|---:|---:|---:|---:|")
    for layers, weight in cases[1:]:
        moved = {
            key: [found[layers, weight, seed][key] - found[None, 0.0, seed][key] for seed in seeds]
            for key in before
        }
        print(
            f"| `{layers}` | {weight:g} | {told(moved['last'], '+.4f')} | {told(moved['mean'], '+.4f')} | "
            f"{told([100 * value for value in moved['log_perplexity']], '+.2f')} |"
        )
    print(f"\n{time.process_time() - cpu:.0f} s of CPU, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
