"""A store from stock samples beside that of the dispersion task: real commands, every column, all vectors.

    python benchmarks/from_samples.py --model HuggingFaceTB/SmolLM2-135M --tasks gsm8k,wikitext --limit 12

Runs stock `lm_eval` with `--log_samples`, the dispersion tasks, and `dispersion embed --from-samples`; then
compares the stores. Vectors and the model's own perplexities are told with their differences, all else must
be equal. Fails where a column differs.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from lmeval_dispersion.geometry import dispersion  # noqa: E402
from lmeval_dispersion.store import read_store  # noqa: E402

_MEASURED = ("query_perplexity",)  # computed from the model's own logits: equal up to noise
_LAYERS = ["last", "layer.-1"]


def run(name: str, command: list[str]) -> None:
    """Run a command, and tell its wall and CPU seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'screener'}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name}: {time.perf_counter() - start:.0f} s, {cpu:.0f} s of CPU", flush=True)
    for line in done.stderr.splitlines():
        if "prompts run" in line or ": note:" in line:
            print(f"  {line}", flush=True)


def compared(ours: Path, theirs: Path) -> list[str]:
    """The columns in which two stores differ; prints what is measured."""
    a, b = read_store(ours), read_store(theirs)
    mine, other = a.documents, b.documents
    differ = [name for name in mine.columns if name not in other.columns]
    differ += [name for name in other.columns if name not in mine.columns]
    for name in mine.columns:
        if name in _MEASURED or name in differ:
            continue
        if [repr(v) for v in mine[name].map(_plain)] != [repr(v) for v in other[name].map(_plain)]:
            differ.append(name)
    shown = "none" if not differ else ", ".join(differ)
    print(f"{ours.name}: {len(mine)} rows, {len(mine.columns)} columns, that differ: {shown}", flush=True)
    first, second = (frame["query_perplexity"].to_numpy(float) for frame in (mine, other))
    if np.isfinite(first).any():
        apart = np.abs(second / first - 1)
        print(f"  query_perplexity: median {np.nanmedian(apart):.2g} apart, at most {np.nanmax(apart):.2g}")
    for layer in a.layers:
        x, y = (np.asarray(store.vectors(layer), dtype=np.float64) for store in (a, b))
        apart = np.linalg.norm(x - y, axis=1) / np.linalg.norm(x, axis=1)
        print(
            f"  {layer}: vectors {np.median(apart):.2g} of their length apart at the median, at most "
            f"{apart.max():.2g}; dispersion {dispersion(x):.6f} and {dispersion(y):.6f}"
        )
    for key in ("identity", "tasks", "default_layer"):
        if a.manifest.get(key) != b.manifest.get(key):
            print(f"  manifest's {key}: {a.manifest.get(key)} and {b.manifest.get(key)}")
    return differ


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="Hub id or folder")
    parser.add_argument("--tasks", required=True, help="stock names, with commas")
    parser.add_argument("--limit", default="8")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", default="4")
    parser.add_argument("--samples-batch-size", help="of the store from samples (default: the same)")
    parser.add_argument("--fewshot", help="examples before every question (default: the task's)")
    parser.add_argument("--gen-kwargs", help="such as max_gen_toks=32")
    parser.add_argument("--folder", help="keep what was run here (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        sys.exit(measure(arguments, folder))


def measure(arguments: argparse.Namespace, folder: Path) -> int:
    from lmeval_dispersion.harness import install

    tasks = arguments.tasks.split(",")
    shared = [
        "lm_eval", "--model", "hf", "--model_args", f"pretrained={arguments.model},dtype={arguments.dtype}",
        "--device", arguments.device, "--batch_size", arguments.batch_size, "--limit", arguments.limit,
        "--confirm_run_unsafe_code",
    ]  # fmt: skip
    if arguments.fewshot:
        shared += ["--num_fewshot", arguments.fewshot]
    if arguments.gen_kwargs:
        shared += ["--gen_kwargs", arguments.gen_kwargs]
    stock, ours, theirs = folder / "stock", folder / "ours", folder / "theirs"
    run("stock task", [*shared, "--tasks", ",".join(tasks), "--log_samples", "--output_path", str(stock)])
    run(
        "dispersion task",
        [*shared, "--tasks", ",".join(f"{task}_dispersion" for task in tasks), "--include_path",
         str(install.tasks_path()), "--metadata", f"dispersion_layers={'+'.join(_LAYERS)}",
         f"dispersion_store={ours}"],
    )  # fmt: skip
    layers = [part for layer in _LAYERS for part in ("--layer", layer)]
    run(
        "store from samples",
        ["lmeval_dispersion", "embed", arguments.model, "--from-samples", str(stock),
         "--device", arguments.device, "--model_args",
         f"dtype={arguments.dtype},batch_size={arguments.samples_batch_size or arguments.batch_size}",
         *layers, "-o", str(theirs)],
    )  # fmt: skip
    stores = [place for place in sorted(theirs.iterdir()) if place.is_dir()]
    return int(any([compared(ours / place.name, place) for place in stores]))


if __name__ == "__main__":
    main()
