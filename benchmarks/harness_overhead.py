"""What dispersion tasks cost: the stock task and ours in pairs, in one run; prints the ratios.

    python benchmarks/harness_overhead.py --pairs 7
    python benchmarks/harness_overhead.py --device cuda --dtype bfloat16 --size 1b --pairs 5

Time is that of lm-eval's evaluation without loading (requests, model, metrics, store), order of the two
alternating from pair to pair; the figure is the median over pairs with their range. CPU time is what the
process itself used, on a busy machine the steadier of the two. Peak memory is that of a fresh process each
(resident size) on CPUs, and torch's own count on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent.parent / "tests" / "harness")]

SIZES = {
    "20m": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 32_000},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256},
}
TASKS = {"stock": "mmlu_stem", "ours": "mmlu_stem_dispersion"}


def model(arguments: argparse.Namespace, batch_size: int) -> Any:
    import torch
    import transformers
    from harness_world import hflm, trained_tokenizer

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES[arguments.size],
        num_attention_heads=8,
        max_position_embeddings=2048,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.device(arguments.device):
        built = transformers.LlamaForCausalLM(config).to(getattr(torch, arguments.dtype)).eval()
    return hflm(built, trained_tokenizer(), batch_size=batch_size)


def evaluation(lm: Any, kind: str, folder: Path, limit: int) -> tuple[float, float, Any]:
    """Wall and CPU seconds that lm-eval takes over tasks that are loaded already, and its results."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from lmeval_dispersion.harness import install

    theirs = str(install.harness_tasks() / "mmlu")
    store = tempfile.mkdtemp(dir=folder)
    manager = TaskManager(
        include_path=[theirs, str(install.tasks_path())],
        include_defaults=False,
        metadata={"dispersion_store": store},
    )
    loaded = manager.load([TASKS[kind]])
    for task in loaded["tasks"].values():
        task.set_config("num_fewshot", 2)
        task.set_fewshot_seed(1234)
    start, used = time.perf_counter(), time.process_time()
    results = lm_eval.evaluate(lm=lm, task_dict=loaded, limit=limit, log_samples=False)
    if lm.device.type == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - used, results


def peak(arguments: argparse.Namespace, kind: str, batch_size: int) -> int:
    """Peak bytes of a fresh process that runs one of the two."""
    command = [sys.executable, "-W", "ignore", str(HERE), "--only", kind, "--batch", str(batch_size)]
    for name in ("device", "dtype", "size", "limit"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1])["peak"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--limit", type=int, default=4, help="questions of each of 19 subjects")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--only", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    from datasets_layout import write_all

    os.environ["HF_DATASETS_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_all(folder)
        os.chdir(folder)
        import datasets

        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        datasets.disable_progress_bars()
        import torch

        if arguments.only:
            lm = model(arguments, arguments.batch)
            evaluation(lm, arguments.only, folder, arguments.limit)
            if arguments.device == "cuda":
                used = torch.cuda.max_memory_allocated()
            else:
                used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({"peak": used}))
            return
        for batch_size in arguments.batches:
            measure(arguments, batch_size, folder)


def measure(arguments: argparse.Namespace, batch_size: int, folder: Path) -> None:
    import torch

    lm = model(arguments, batch_size)
    evaluation(lm, "stock", folder, 1)  # warm-up: data set cache, allocator
    wall: dict[str, list[float]] = {"stock": [], "ours": []}
    cpu: dict[str, list[float]] = {"stock": [], "ours": []}
    memory = {"stock": 0, "ours": 0}
    accuracies = {}
    for pair in range(arguments.pairs):
        for kind in ("stock", "ours") if pair % 2 == 0 else ("ours", "stock"):
            if arguments.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken, used, results = evaluation(lm, kind, folder, arguments.limit)
            wall[kind].append(taken)
            cpu[kind].append(used)
            if arguments.device == "cuda":
                memory[kind] = max(memory[kind], torch.cuda.max_memory_allocated())
            figures = results["results"]
            accuracies[kind] = [v["acc,none"] for k, v in sorted(figures.items()) if "acc,none" in v]
    assert accuracies["stock"] == accuracies["ours"]
    if arguments.device != "cuda":
        memory = {kind: peak(arguments, kind, batch_size) for kind in memory}
    print(
        f"{arguments.device} {arguments.dtype} {arguments.size} batch {batch_size}, {arguments.pairs} pairs: "
        f"wall {compared(wall)}; CPU {compared(cpu)}; "
        f"peak {memory['stock'] / 2**20:.1f} MiB stock, {memory['ours'] / 2**20:.1f} MiB ours, "
        f"ratio {memory['ours'] / memory['stock']:.4f}",
        flush=True,
    )


def compared(seconds: dict[str, list[float]]) -> str:
    ratios = [ours / stock for stock, ours in zip(seconds["stock"], seconds["ours"], strict=True)]
    return (
        f"{statistics.median(seconds['stock']):.2f} s stock, "
        f"{statistics.median(seconds['ours']):.2f} s ours, "
        f"ratio {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})"
    )


if __name__ == "__main__":
    main()
