"""What the check at the start of a run says of right and wrong engines, on a real model.

    python benchmarks/engine_check.py --model HuggingFaceTB/SmolLM2-135M --samples RESULTS --dtype bfloat16

RESULTS is a run of stock lm-eval with `--log_samples` on the model. The engines are processes that speak the
protocols of vLLM and SGLang (`tests/harness/engine_server.py`) with kernels of their own: another attention.
Wrong ones give another layer, divide by the length, cut a token, or run other weights: the model after a few
steps of AdamW on the logged prompts. Prints what each is told; every store from a right engine is written.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "screener")]

RATE = 1e-5  # of AdamW: a usual one for fine-tuning


@contextmanager
def engine(model: str, dtype: str, attention: str) -> Iterator[str]:
    """Address of a stand-in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = ROOT / "tests" / "harness" / "engine_server.py"
    process = subprocess.Popen([sys.executable, str(script), model, str(port), dtype, attention])
    try:
        while process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def prompts(samples: str) -> list[str]:
    from lmeval_dispersion.harness.samples import find_run, read_task

    run = find_run(samples)
    tasks = [read_task(run, name) for name in run.samples]
    return [str(one.arguments[0][0]) for task in tasks for one in next(iter(task.filters.values()))]


def revisions(model: str, texts: list[str], counts: list[int], folder: Path) -> Iterator[tuple[int, str]]:
    """The model after some steps on the texts, saved."""
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    for step in range(1, max(counts) + 1):
        inputs = tokenizer(texts[step % len(texts)], return_tensors="pt", truncation=True, max_length=128)
        network(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in counts:
            network.save_pretrained(folder / str(step))
            tokenizer.save_pretrained(folder / str(step))
            yield step, str(folder / str(step))


def told(arguments: argparse.Namespace, backend: str, url: str, folder: Path) -> str:
    """What a run with the engine ends with."""
    from lmeval_dispersion.errors import HarnessError
    from lmeval_dispersion.harness.engines.engine import Agreement
    from lmeval_dispersion.harness.from_samples import stores_from_samples
    from lmeval_dispersion.store import read_store

    given = {"pretrained": arguments.model, "dtype": arguments.dtype, "device": "cpu"}
    try:
        stores_from_samples(arguments.samples, given, folder, backend=backend, base_url=url)
    except HarnessError as error:
        return f"stops: {str(error).split('; start it')[0]}"
    check = read_store(next(folder.iterdir())).manifest["samples"]["engine_check"]
    both = (check["dispersion"], check["hf_dispersion"])
    found = Agreement(check["difference_max"], check["hf_batch_difference_max"], both, check["states"], False)
    return f"goes on: {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="Hub id or folder")
    parser.add_argument("--samples", required=True, help="folder of the run")
    parser.add_argument("--dtype", default="bfloat16", help="of transformers, and of the engine by default")
    parser.add_argument("--steps", default="1,4,16", help="of the other revisions")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as temporary:
        folder, count = Path(temporary), 0

        def say(name: str, backend: str, url: str) -> None:
            nonlocal count
            count += 1
            print(f"{name}, {backend}: {told(arguments, backend, url, folder / f'store{count}')}", flush=True)

        with engine(arguments.model, arguments.dtype, "eager") as url:
            for backend in ("vllm", "sglang"):
                say("the same model", backend, f"{url}/{backend}")
            for name, word, backend in (
                ("before the final norm", "before-norm", "vllm"),
                ("without the last block", "below", "vllm"),
                ("divided by the length", "unit", "vllm"),
                ("a token too few", "shifted", "sglang"),
            ):
                say(name, backend, f"{url}/{word}/{backend}")
        for dtype in {"float32", "float16", "bfloat16"} - {arguments.dtype}:
            with engine(arguments.model, dtype, "eager") as url:
                say(f"the same in {dtype}", "vllm", f"{url}/vllm")
        counts = [int(one) for one in arguments.steps.split(",")]
        for step, path in revisions(arguments.model, prompts(arguments.samples), counts, folder / "other"):
            with engine(path, arguments.dtype, "eager") as url:
                say(f"{step} steps later", "vllm", f"{url}/vllm")


if __name__ == "__main__":
    main()
