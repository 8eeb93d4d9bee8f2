"""``dispersion embed MODEL FILE``: a run of plain texts, made by a model without the harness.

A document's vector is the state at its last token, its
perplexity that of its own tokens after the first. Columns of a JSONL or parquet file travel along, so labels
(``correct``) and slices (``subject``, or any other) can be in the file.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.model.capture import capture, depth, resolve, split_names
from lmeval_dispersion.model.loading import DTYPES, LoadedModel, load_model
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.options import add_column, add_examples, add_layers, add_quiet
from lmeval_dispersion.store import COLUMNS, write_store

_BATCH_TOKENS = 2048
_NO_LIMIT = 10**6  # tokenizers without a limit say 1e30
_FALLBACK_LENGTH = 2048


class _Encoded(NamedTuple):
    row: int
    ids: list[int]


def write_text_run(
    loaded: LoadedModel,
    texts: Texts,
    path: str | Path,
    *,
    layers: Sequence[str] = ("last",),
    task: str | None = None,
) -> Path:
    """Run the model over every text and write the store; returns its folder.

    Texts longer than the model's context keep their end and are marked as truncated. ``task`` names the
    data (default: the file's name); a calibrator holds for one task, so files that belong together need
    one name.

    Raises:
        UsageError: No text, or no such layer.
    """
    name = task or Path(texts.source).name
    names = [site.name for site in resolve(loaded.model, layers)]
    entries = list(texts)
    if not entries:
        raise UsageError(f"{texts.source} holds no text; check the file and --column")
    if report := texts.report():
        print(report, file=sys.stderr)
    limit = _longest(loaded)
    ids = [loaded.tokenizer(text.text)["input_ids"] for text in entries]
    encoded = [_Encoded(row, tokens[-limit:]) for row, tokens in enumerate(ids) if tokens]
    documents = pd.DataFrame(
        {
            "doc_id": [text.id for text in entries],
            "task": name,
            "doc_hash": [hashlib.sha256(text.text.encode()).hexdigest() for text in entries],
            "prompt_tokens": [min(len(tokens), limit) for tokens in ids],
            "truncated": [len(tokens) > limit for tokens in ids],
            "text": [text.text for text in entries],
        }
    )
    documents = _with_columns(documents, texts)
    vectors: dict[str, Any] = {}
    perplexity = np.full(len(entries), np.nan)
    for batch in _batches(encoded):
        states, values = _forward(loaded, batch, names)
        rows = [item.row for item in batch]
        perplexity[rows] = values
        for layer, rows_of_states in states.items():
            width = rows_of_states.shape[1]
            # A text without a token keeps a row without direction.
            store = vectors.setdefault(layer, np.full((len(entries), width), np.nan, dtype=np.float32))
            store[rows] = rows_of_states
    if not vectors:
        raise UsageError(f"no text of {texts.source} has a token; check the file and the tokenizer")
    documents["query_perplexity"] = perplexity
    manifest = {
        "model": loaded.name,
        "revision": loaded.revision,
        "depth": depth(loaded.model.config),
        "model_args": {"dtype": str(next(loaded.model.parameters()).dtype).removeprefix("torch.")},
        "tasks": {name: None},
        "num_fewshot": 0,
        "chat_template": None,
        "prompt_format": "plain texts",
        "identity": {**loaded.identity, "prompt_template": "plain texts"},
        "limit": None,
        "versions": {"torch": torch.__version__},
    }
    return write_store(
        path, documents=documents, vectors={layer: vectors[layer] for layer in names}, manifest=manifest
    )


def _forward(
    loaded: LoadedModel, batch: Sequence[_Encoded], names: Sequence[str]
) -> tuple[dict[str, Any], list[float]]:
    """Last-token states (b, d) of every layer and the perplexity of every text of one batch."""
    lengths = [len(item.ids) for item in batch]
    ids = torch.full((len(batch), max(lengths)), loaded.tokenizer.pad_token_id)
    for i, item in enumerate(batch):
        ids[i, : len(item.ids)] = torch.tensor(item.ids)
    # Padding on the right of a causal model changes nothing on its left.
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    with torch.inference_mode(), capture(loaded.model, names) as states:
        logits = loaded.model(
            input_ids=ids.to(loaded.device), attention_mask=mask.long().to(loaded.device), use_cache=False
        ).logits
        index = torch.tensor(lengths) - 1
        rows = {
            name: state[torch.arange(len(batch)), index.to(state.device)].float().cpu().numpy()
            for name, state in states.items()
        }
        perplexities = [_perplexity(logits[i, : n - 1], ids[i, 1:n]) for i, n in enumerate(lengths)]
    return rows, perplexities


def _perplexity(logits: torch.Tensor, following: torch.Tensor) -> float:
    if not len(following):
        return math.nan
    loss = torch.nn.functional.cross_entropy(logits.float(), following.to(logits.device))
    return float(torch.exp(loss))


def _batches(encoded: list[_Encoded]) -> Iterator[list[_Encoded]]:
    """Texts of similar length together, at most about 2,048 tokens with padding."""
    batch: list[_Encoded] = []
    for item in sorted(encoded, key=lambda item: (len(item.ids), item.row)):
        if batch and len(item.ids) * (len(batch) + 1) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _longest(loaded: LoadedModel) -> int:
    config = loaded.model.config
    text_config = getattr(config, "text_config", None) or config
    known = [getattr(text_config, "max_position_embeddings", None), loaded.tokenizer.model_max_length]
    return min([int(n) for n in known if n and 0 < n < _NO_LIMIT], default=_FALLBACK_LENGTH)


def _with_columns(documents: pd.DataFrame, texts: Texts) -> pd.DataFrame:
    """The documents with the other columns of their file; ``doc_id`` is the position in the file."""
    if texts.path is None or texts.continuous:
        return documents
    if texts.path.suffix == ".parquet":
        frame = pd.read_parquet(texts.path)
    else:
        frame = pd.DataFrame([_record(line) for line in _lines(texts.path)])
    taken = frame.iloc[documents["doc_id"].to_numpy()].reset_index(drop=True)
    taken_names = {"doc_id", "text", "query_perplexity", "prompt_tokens", "truncated", texts.column}
    for name in taken.columns:
        plain = taken[name].map(lambda value: value is None or isinstance(value, str | bool | int | float))
        if name not in taken_names and (plain.all() or name in COLUMNS):
            documents[str(name)] = taken[name]
    if "correct" in documents:
        try:
            documents["correct"] = pd.to_numeric(documents["correct"]).astype(float)
        except (TypeError, ValueError):
            raise UsageError(
                f"expected numbers in [0, 1] in the column `correct` of {texts.source}"
            ) from None
        if not documents["correct"].dropna().between(0, 1).all():
            raise UsageError(f"expected numbers in [0, 1] in the column `correct` of {texts.source}")
    return documents


def _lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        yield from (line for line in stream if line.strip())


def _record(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def add_embed_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion embed``."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="Hub id or folder of a decoder model")
    parser.add_argument(
        "texts", nargs="?", metavar="FILE|HUB_ID", help="text, JSONL or parquet file, or a Hub data set"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="folder of the store to write"
    )
    add_layers(parser, what="layer to keep: last, norm, layer.K, layer.K.attn, layer.K.ffn", default="last")
    parser.add_argument(
        "--task", metavar="NAME", help="name of the data; a calibrator holds for one (default: the file's)"
    )
    parser.add_argument(
        "--revision", metavar="REVISION", help="branch, tag or commit of the model (default: the main one)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of the weights (default: the checkpoint's own)"
    )
    parser.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda, cuda:1, auto (default: the first GPU, else the CPU)"
    )
    add_column(parser)
    add_quiet(parser)
    add_examples(
        parser,
        "Qwen/Qwen2.5-0.5B questions.jsonl --column question -o store",
        "./my-model texts.txt --layer last --layer layer.-2 -o store",
    )


def run_embed(args: argparse.Namespace) -> int:
    """Run ``dispersion embed MODEL TEXTS``."""
    if args.model is None or args.texts is None:
        raise UsageError("expected a model and a file of texts, or --from-samples DIR and --model MODEL")
    texts = Texts(args.texts, column=args.column)
    loaded = load_model(args.model, revision=args.revision, dtype=args.dtype, device=args.device)
    names = split_names("+".join(args.layer or []))
    folder = write_text_run(loaded, texts, args.output, layers=names, task=args.task)
    print(folder)
    if not args.quiet:
        print(f"next: dispersion audit {folder}", file=sys.stderr)
    return 0
