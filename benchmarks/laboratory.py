"""The laboratory's cost: memory, condensation beside embedding-condensation of PyPI.

    python benchmarks/laboratory.py memory
    python benchmarks/laboratory.py peer --peer-python /path/to/an/environment/bin/python

The peer is another group's package under a non-commercial licence: whoever runs this installs it, in an
environment of its own beside torch and transformers (pip install --no-deps embedding-condensation), and it
is only called. Each measurement is a process of its own; both sides run the same model on the same texts, in
turns, on one thread, and CPU seconds are counted, forward passes included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WORDS = [f"w{i}" for i in range(900)]


def saved_model(folder: Path, layers: int, width: int, positions: int) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<unk>": 0, "</s>": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=positions,
        bos_token_id=1,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def texts(path: Path, count: int, length: int) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(count):
            row = " ".join(WORDS[i] for i in rng.zipf(1.2, length) % len(WORDS))
            file.write(json.dumps({"text": row}) + "\n")


class Peak:
    """Highest memory of this process while it runs: all of it, and the part that is not a file's (MB)."""

    def __enter__(self) -> Peak:
        self.total = self.anonymous = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while True:
            fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            self.total = max(self.total, int(fields["VmRSS"].split()[0]) / 1024)
            self.anonymous = max(self.anonymous, int(fields["RssAnon"].split()[0]) / 1024)
            if self._stop.wait(0.02):
                return

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def child_law(spec: dict) -> dict:
    from lmeval_dispersion import law

    started = time.perf_counter()
    with Peak() as peak:
        found = law(
            spec["model"], spec["data"], segment=spec["length"], layers="all", contexts=(16,), batch=64,
            folder=spec["folder"],
        )  # fmt: skip
    seconds = time.perf_counter() - started
    counted = found.manifest["segments.data"]["counts"]["kept"]
    return {"seconds": seconds, "total": peak.total, "anonymous": peak.anonymous, "segments": counted}


def child_ours(spec: dict) -> dict:
    from lmeval_dispersion import condensation
    from lmeval_dispersion.model.loading import load_model

    model = load_model(spec["model"])
    with Peak() as peak:
        started = time.process_time()
        found = condensation(model, spec["data"], segment=spec["length"], segments=spec["texts"])
        seconds = time.process_time() - started
    # The package counts each token with itself.
    means = (found.layers["mean"] + (1 - found.layers["mean"]) / spec["length"]).tolist()
    return {"seconds": seconds, "total": peak.total, "anonymous": peak.anonymous, "means": means}


def child_peer(spec: dict) -> dict:
    from embedding_condensation import measure_embedding_condensation
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(spec["model"]), AutoTokenizer.from_pretrained(spec["model"])
    rows = [json.loads(line)["text"] for line in Path(spec["data"]).read_text().splitlines()]
    with Peak() as peak:
        started = time.process_time()
        found = measure_embedding_condensation(
            model, tokenizer, texts=rows, repetitions=len(rows), max_length=spec["length"],
            plot=False, save_path=None, show_progress=False,
        )  # fmt: skip
        means = [float(matrix.mean()) for matrix in found.cossim_by_layer]
        seconds = time.process_time() - started
    return {"seconds": seconds, "total": peak.total, "anonymous": peak.anonymous, "means": means}


def measured(python: str, child: str, spec: dict) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, __file__, "child", child, json.dumps(spec)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def memory(sizes: list[int], length: int) -> None:
    print(f"dispersion inspect law, 4 layers, width 64, segments of {length} tokens, all layers, batch 64")
    print("segments   seconds   peak MB   of it anonymous MB   ratio to the first")
    first = None
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            saved_model(Path(folder) / "model", layers=4, width=64, positions=length)
            texts(Path(folder) / "text.jsonl", size, length)
            spec = {"model": f"{folder}/model", "data": f"{folder}/text.jsonl", "folder": f"{folder}/study"}
            found = measured(sys.executable, "law", {**spec, "length": length})
        first = first or found
        ratio = found["anonymous"] / first["anonymous"]
        print(
            f"{found['segments']:8d}  {found['seconds']:8.1f}  {found['total']:8.0f}  "
            f"{found['anonymous']:19.0f}  {ratio:19.2f}",
            flush=True,
        )


def peer(python: str, count: int, repeats: int) -> None:
    import numpy as np

    print(f"{count} texts, width 256, one thread, CPU seconds, medians of {repeats} turns")
    print(
        "MB: peak minus that of 5 texts; difference: of the layer means with each token counted with itself"
    )
    print(
        "  ".join(("layers", "tokens", "ours s", "peer s", "peer/ours", "ours MB", "peer MB", "difference"))
    )
    for layers, length in ((4, 128), (4, 512), (12, 128), (12, 512)):
        with tempfile.TemporaryDirectory() as folder:
            saved_model(Path(folder) / "model", layers=layers, width=256, positions=512)
            texts(Path(folder) / "text.jsonl", count, length)
            texts(Path(folder) / "few.jsonl", 5, length)
            spec = {"model": f"{folder}/model", "length": length, "texts": count}
            sides = {"ours": sys.executable, "peer": python}
            runs: dict[str, list[dict]] = {side: [] for side in sides}
            for _ in range(repeats):
                for side, interpreter in sides.items():
                    runs[side].append(measured(interpreter, side, {**spec, "data": f"{folder}/text.jsonl"}))
            few = {
                side: measured(interpreter, side, {**spec, "data": f"{folder}/few.jsonl"})
                for side, interpreter in sides.items()
            }
        seconds = {side: statistics.median(run["seconds"] for run in found) for side, found in runs.items()}
        grown = {
            side: statistics.median(run["anonymous"] for run in found) - few[side]["anonymous"]
            for side, found in runs.items()
        }
        worst = np.abs(np.subtract(runs["ours"][0]["means"], runs["peer"][0]["means"])).max()
        print(
            f"{layers:6d}  {length:6d}  {seconds['ours']:6.2f}  {seconds['peer']:6.2f}  "
            f"{seconds['peer'] / seconds['ours']:9.2f}  {grown['ours']:7.0f}  {grown['peer']:7.0f}  "
            f"{worst:10.1e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("memory")
    one.add_argument("--sizes", type=int, nargs="+", default=[5_000, 20_000, 100_000])
    one.add_argument("--length", type=int, default=64)
    two = commands.add_parser("peer")
    two.add_argument("--peer-python", required=True)
    two.add_argument("--texts", type=int, default=100)
    two.add_argument("--repeats", type=int, default=3)
    child = commands.add_parser("child")
    child.add_argument("name")
    child.add_argument("spec")
    args = parser.parse_args()
    if args.command == "memory":
        memory(args.sizes, args.length)
    elif args.command == "peer":
        peer(args.peer_python, args.texts, args.repeats)
    else:
        children = {"law": child_law, "ours": child_ours, "peer": child_peer}
        print(json.dumps(children[args.name](json.loads(args.spec))))


if __name__ == "__main__":
    main()
