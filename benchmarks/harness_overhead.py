"""The cost of dispersion tasks: the stock task and ours in pairs, in one run; prints the ratios.

    python benchmarks/harness_overhead.py --pairs 7
    python benchmarks/harness_overhead.py --device cuda --dtype bfloat16 --size 1b --pairs 5

Time is that of lm-eval's evaluation without loading (requests, model, metrics, store), order of the two
alternating from pair to pair; the figure is the median over pairs with their range. CPU time is what the
process itself used, on a busy machine the steadier of the two. Peak memory is that of a fresh process each:
resident size on CPUs, torch's own count on a GPU.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.shared import in_a_child, parsed  # noqa: E402

SIZES = {
    "20m": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "vocab_size": 32_000,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 128_256,
    },
}
TASKS = {"stock": "mmlu_stem", "ours": "mmlu_stem_dispersion"}


def model(arguments: Any, batch_size: int) -> Any:
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


def peak(arguments: Any, kind: str, batch_size: int) -> int:
    """Peak bytes of a fresh process that runs one of the two."""
    shape = [
        f"--{name}={getattr(arguments, name)}" for name in ("device", "dtype", "size", "limit")
    ]
    return int(in_a_child(sys.executable, __file__, *shape, "--child", kind, batch_size)["peak"])


def main() -> None:
    arguments = parsed(
        __doc__,
        ("--device", {"default": "cpu"}),
        ("--dtype", {"default": "float32"}),
        ("--size", {"choices": SIZES, "default": "20m"}),
        ("--pairs", {"type": int, "default": 5}),
        ("--limit", {"type": int, "default": 4, "help": "questions of each of 19 subjects"}),
        ("--batches", {"type": int, "nargs": "+", "default": [1, 16]}),
        hidden=("--child", 2),
    )
    from datasets_layout import write_all

    os.environ["HF_DATASETS_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_all(folder)
        os.chdir(folder)
        import datasets

        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        datasets.disable_progress_bars()
        if not arguments.child:
            for batch_size in arguments.batches:
                measure(arguments, batch_size, folder)
            return
        import torch

        kind, batch_size = arguments.child
        evaluation(model(arguments, int(batch_size)), kind, folder, arguments.limit)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            json.dumps(
                {"peak": torch.cuda.max_memory_allocated() if arguments.device == "cuda" else used}
            )
        )


def measure(arguments: Any, batch_size: int, folder: Path) -> None:
    lm = model(arguments, batch_size)
    evaluation(lm, "stock", folder, 1)  # warm-up: data set cache, allocator
    wall: dict[str, list[float]] = {"stock": [], "ours": []}
    cpu: dict[str, list[float]] = {"stock": [], "ours": []}
    accuracies = {}
    for pair in range(arguments.pairs):
        for kind in ("stock", "ours") if pair % 2 == 0 else ("ours", "stock"):
            taken, used, results = evaluation(lm, kind, folder, arguments.limit)
            wall[kind].append(taken)
            cpu[kind].append(used)
            figures = results["results"]
            accuracies[kind] = [
                v["acc,none"] for k, v in sorted(figures.items()) if "acc,none" in v
            ]
    assert accuracies["stock"] == accuracies["ours"]
    memory = {kind: peak(arguments, kind, batch_size) for kind in wall}
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
