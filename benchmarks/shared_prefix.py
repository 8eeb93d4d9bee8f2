"""What running the shared beginning of few-shot prompts once saves a store from samples, in pairs.

    OMP_NUM_THREADS=1 python benchmarks/shared_prefix.py --model HuggingFaceTB/SmolLM2-135M

One prefill a document, as a store from samples does it, with the beginning shared and with every prompt run
whole, the order alternating from pair to pair. Prints tokens, CPU seconds, their ratio, and how far the
states of the two ways are apart.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent.parent / "screener")]

LAYER = "last"


def instances(task, fewshot, limit):
    """The first choice of every question: its prompt is what a store from samples runs."""
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    from lmeval_dispersion.harness import install, requests

    families = install.harness_tasks()
    manager = TaskManager(include_path=[str(families / task.split("_")[0])], include_defaults=False)
    built = manager.load([task])["tasks"][task]
    built.set_config("num_fewshot", fewshot)
    built.set_fewshot_seed(1234)
    built.build_all_requests(limit=limit)
    kind = requests.REQUEST_TYPES["loglikelihood"]
    found = []
    for one in built.instances:
        if one.idx == 0:
            again = Instance(kind, {}, one.args, 0, metadata=(task, one.doc_id, 1))
            # Without its query the whole prompt's perplexity is wanted, and nothing can be shared.
            again.query, again.dispersion_layers = built.doc_to_text(one.doc), (LAYER,)
            found.append(again)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", default="mmlu_anatomy")
    parser.add_argument("--fewshot", type=int, default=5)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    from lm_eval.models.huggingface import HFLM

    from lmeval_dispersion.harness import requests
    from lmeval_dispersion.harness.engines.prefill import on_transformers

    requests.install()
    lm = HFLM(args.model, dtype=args.dtype, device=args.device, batch_size=args.batch_size)
    prompts = instances(args.task, args.fewshot, args.limit)
    run = {True: 0, False: 0}

    def count(_, given, named):
        run[share] += (given[0] if given else named["input_ids"]).numel()

    lm.model.register_forward_pre_hook(count, with_kwargs=True)
    print(f"{len(prompts)} prompts of {args.task}, {args.fewshot} examples", flush=True)
    taken = {True: [], False: []}
    states = {}
    for pair in range(args.pairs):
        for share in (True, False) if pair % 2 else (False, True):
            run[share], start = 0, time.process_time()
            seen = on_transformers(lm, share=share)(prompts)
            taken[share].append(time.process_time() - start)
            states[share] = np.concatenate([one.state.vectors[LAYER] for one in seen]).astype(np.float64)
        print(
            f"  whole {taken[False][-1]:.1f} s ({run[False]} tokens), shared {taken[True][-1]:.1f} s "
            f"({run[True]} tokens)",
            flush=True,
        )
    ratios = [b / a for a, b in zip(taken[True], taken[False], strict=True)]
    apart = np.linalg.norm(states[True] - states[False], axis=1) / np.linalg.norm(states[False], axis=1)
    print(
        f"CPU time: {statistics.median(ratios):.1f} times less ({min(ratios):.1f} to {max(ratios):.1f} over "
        f"{args.pairs} pairs); states at most {apart.max():.1e} of their length apart"
    )


if __name__ == "__main__":
    main()
