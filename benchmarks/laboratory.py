"""Memory and time of `dispersion inspect law` over many segments: `python benchmarks/laboratory.py`.

A random Llama of four layers and words by Zipf's law; each size is a process of its own, on one thread.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shared import in_a_child, parsed, peak_mb

WORDS = [f"w{i}" for i in range(900)]
LAYERS, WIDTH = 4, 64


def saved_model(folder: Path, positions: int) -> None:
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
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
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


def measured(folder: str, length: int) -> dict[str, float]:
    from lmeval_dispersion import law

    started = time.perf_counter()
    study = law(
        f"{folder}/model",
        f"{folder}/text.jsonl",
        segment=length,
        layers="all",
        contexts=(16,),
        batch=64,
        folder=f"{folder}/study",
    )
    seconds = time.perf_counter() - started
    kept = study.manifest["segments.data"]["counts"]["kept"]
    return {"seconds": seconds, "peak": peak_mb(), "segments": kept}


def main() -> None:
    args = parsed(
        __doc__,
        ("--sizes", {"type": int, "nargs": "+", "default": [5_000, 20_000, 100_000]}),
        ("--length", {"type": int, "default": 64}),
        hidden=("--child", 1),
    )
    if args.child:
        print(json.dumps(measured(args.child[0], args.length)))
        return
    print(f"{LAYERS} layers, width {WIDTH}, segments of {args.length} tokens, all layers, batch 64")
    print("segments   seconds   peak MB   ratio to the first")
    first = 0.0
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            saved_model(Path(folder) / "model", args.length)
            texts(Path(folder) / "text.jsonl", size, args.length)
            words = ["--length", args.length, "--child", folder]
            figures = in_a_child(sys.executable, __file__, *words, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        first = first or figures["peak"]
        print(
            f"{figures['segments']:8d}  {figures['seconds']:8.1f}  {figures['peak']:8.0f}  "
            f"{figures['peak'] / first:19.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
