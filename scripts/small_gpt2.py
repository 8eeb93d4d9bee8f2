"""A small GPT-2 to start from, and Python source as a second domain, to train on a CPU.

    python scripts/small_gpt2.py FOLDER WIKI.TRAIN.TXT

writes FOLDER/model (configuration and tokenizer, no weights: use --from-scratch), and
FOLDER/python-train.jsonl and FOLDER/python-test.jsonl: the modules of this interpreter's standard library,
every tenth by name held out. The tokenizer is a byte-level BPE of 4,096 tokens, trained on the text and on
the training modules.
"""

import json
import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, PreTrainedTokenizerFast

VOCABULARY, END = 4096, "<|endoftext|>"


def python_modules():
    """Source of the standard library's modules of 2 to 60 kB, in the order of their names, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"test", "tests", "site-packages", "lib2to3", "idlelib"} & set(parts):
            continue
        if 2_000 <= path.stat().st_size <= 60_000:
            yield path.read_text(encoding="utf-8", errors="ignore")


def main():
    folder, wiki = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    modules = list(python_modules())
    parts = {"test": modules[::10], "train": [m for i, m in enumerate(modules) if i % 10]}
    for name, texts in parts.items():
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"python-{name}.jsonl").write_text("".join(lines))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([wiki.read_text(), *parts["train"]], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)
    tokenizer.save_pretrained(folder / "model")
    end = tokenizer.eos_token_id
    GPT2Config(
        n_layer=4,
        n_embd=128,
        n_head=4,
        n_positions=256,
        vocab_size=VOCABULARY,
        bos_token_id=end,
        eos_token_id=end,
    ).save_pretrained(folder / "model")
    print(f"{folder}: {len(modules)} Python modules")


if __name__ == "__main__":
    main()
