"""The laboratory's cost: memory of the law over many segments, and of logits that nobody asks for.

    python benchmarks/laboratory.py memory
    python benchmarks/laboratory.py logits MODEL

Each measurement is a process of its own, on one thread; the seconds of logits are CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shared import in_a_child

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
    from lmeval_dispersion.laboratory import law

    started = time.perf_counter()
    with Peak() as peak:
        found = law(
            spec["model"], spec["data"], segment=spec["length"], layers="all", contexts=(16,), batch=64,
            folder=spec["folder"],
        )  # fmt: skip
    seconds = time.perf_counter() - started
    counted = found.manifest["segments.data"]["counts"]["kept"]
    return {"seconds": seconds, "total": peak.total, "anonymous": peak.anonymous, "segments": counted}


def child_logits(spec: dict) -> dict:
    """Passes over random tokens as ``spec["how"]`` says: whole logits, scored in stretches, or none."""
    import numpy as np

    from lmeval_dispersion.laboratory.causal_model import CausalModel

    causal = CausalModel(spec["model"])
    causal.bare_head = spec["how"] != "whole"
    tokens = np.random.default_rng(0).integers(5, 1000, (spec["batch"], spec["length"])).astype(np.uint32)
    options = {"batch": len(tokens), "losses": spec["how"] != "none"}

    def passed(some):
        return causal.run(some, ["last"], lambda *_: None, **options)[1]

    passed(tokens[:1])
    before = Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]
    with Peak() as peak:
        started = time.process_time()
        losses = [passed(tokens) for _ in range(spec["passes"])]
        seconds = (time.process_time() - started) / spec["passes"]
    grown = peak.anonymous - int(before) / 1024
    summed = [float(x.sum()) for x in losses] if options["losses"] else []
    return {"seconds": seconds, "anonymous": grown, "losses": summed}


def logits(model: str, batch: int, length: int, passes: int) -> None:
    print(f"{model}, {batch} segments of {length} tokens, one thread, CPU seconds a pass")
    print("logits        seconds   MB grown   summed loss in nats")
    for how in ("whole", "stretches", "none"):
        spec = {"model": model, "batch": batch, "length": length, "passes": passes, "how": how}
        found = measured("logits", spec)
        loss = f"{found['losses'][0]:.9g}" if found["losses"] else ""
        print(f"{how:12s}  {found['seconds']:7.2f}  {found['anonymous']:9.0f}   {loss}", flush=True)


def measured(child: str, spec: dict) -> dict:
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return in_a_child(sys.executable, __file__, "child", child, json.dumps(spec), **environment)


def memory(sizes: list[int], length: int) -> None:
    print(f"dispersion inspect law, 4 layers, width 64, segments of {length} tokens, all layers, batch 64")
    print("segments   seconds   peak MB   of it anonymous MB   ratio to the first")
    first = None
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            saved_model(Path(folder) / "model", layers=4, width=64, positions=length)
            texts(Path(folder) / "text.jsonl", size, length)
            spec = {"model": f"{folder}/model", "data": f"{folder}/text.jsonl", "folder": f"{folder}/study"}
            found = measured("law", {**spec, "length": length})
        first = first or found
        ratio = found["anonymous"] / first["anonymous"]
        print(
            f"{found['segments']:8d}  {found['seconds']:8.1f}  {found['total']:8.0f}  "
            f"{found['anonymous']:19.0f}  {ratio:19.2f}",
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
    two = commands.add_parser("logits")
    two.add_argument("model")
    for name, value in (("batch", 16), ("length", 128), ("passes", 2)):
        two.add_argument(f"--{name}", type=int, default=value)
    child = commands.add_parser("child")
    child.add_argument("name")
    child.add_argument("spec")
    args = parser.parse_args()
    if args.command == "memory":
        memory(args.sizes, args.length)
    elif args.command == "logits":
        logits(args.model, args.batch, args.length, args.passes)
    else:
        children = {"law": child_law, "logits": child_logits}
        print(json.dumps(children[args.name](json.loads(args.spec))))


if __name__ == "__main__":
    main()
