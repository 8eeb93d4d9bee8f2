"""``dispersion embed MODEL FILE``: a store from plain texts, by a model without lm-eval.

A document's vector is the state at its last token, its perplexity that of its own tokens after the first.
Columns of a JSONL or parquet file are kept: the file may hold labels (``correct``) and slices.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.files import keep_arrays
from lmeval_dispersion.model.capture import capture, depth, resolve, split_names
from lmeval_dispersion.model.loading import LoadedModel, chosen_model, loaded_model
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.store import COLUMNS, write_store
from lmeval_dispersion.store.format import PARTS, make_folder

_TOKENS = 2048  # tokens in a batch, with padding; a killed command loses one batch


def embed(
    model: str,
    texts: str | Path,
    output: str | Path,
    *,
    layer: str | Sequence[str] = "last",
    column: str = "text",
    task: str | None = None,
    model_args: str = "",
    device: str | None = None,
) -> Path:
    """Run a model over every text, and keep the hidden state (d,) at the last token of each, float32.

    Args:
        model: Hub id or folder of a decoder model.
        texts: Text, JSONL or parquet file, or a Hub data set. Of a text that exceeds the model's context the
            end counts.
        output: Folder of the store to write.
        layer: Layers to keep: ``last``, ``norm``, ``layer.K``, ``layer.K.attn``, ``layer.K.ffn``.
        column: Field with the text, where texts have fields.
        task: Name of the data. Default: the file's.
        model_args: As of lm-eval's hf model: ``dtype``, ``load_in_4bit``, ``load_in_8bit``, ``peft``,
            ``revision``, ``trust_remote_code``, such as ``dtype=bfloat16,revision=step1000``.
        device: ``cpu``, ``cuda``, ``cuda:1`` or ``auto``. Default: the first GPU, else the CPU.

    Returns: The folder, which `open_store` and `audit` read.

    Raises:
        UsageError: There is no text, or the model, a layer or the folder cannot be used as given.
    """
    source = Texts(texts, column=column)
    loaded = loaded_model(chosen_model(model, model_args, device))
    layers = [site.name for site in resolve(loaded.model, split_names(layer))]
    task = task or Path(source.source).name
    entries = list(source)
    if not entries:
        raise UsageError(f"{source.source} holds no text; check the file and its column")
    if report := source.report():
        print(report, file=sys.stderr)
    longest = _longest(loaded)
    ids = [loaded.tokenizer(text.text)["input_ids"] for text in entries]
    encoded = [(row, tokens[-longest:]) for row, tokens in enumerate(ids) if tokens]
    if not encoded:
        raise UsageError(
            f"no text of {source.source} has a token; check the file and the tokenizer"
        )
    documents = pd.DataFrame(
        {
            "doc_id": [text.id for text in entries],
            "task": task,
            "doc_hash": [hashlib.sha256(text.text.encode()).hexdigest() for text in entries],
            "prompt_tokens": [min(len(tokens), longest) for tokens in ids],
            "truncated": [len(tokens) > longest for tokens in ids],
            "text": [text.text for text in entries],
            "query_perplexity": math.nan,
        }
    )
    documents = _with_columns(documents, source)
    make_folder(Path(output))  # before the model runs for hours
    identity = {**loaded.identity, "prompt_template": "plain texts"}
    parts = Path(output) / PARTS
    parts.mkdir(exist_ok=True)
    vectors: dict[str, Any] = {}
    for batch in _batches(encoded):
        rows = [row for row, _ in batch]
        of_rows = [tokens for _, tokens in batch]
        name = hashlib.sha256(json.dumps([identity, layers, of_rows]).encode()).hexdigest()[:24]
        keep_arrays(parts / f"{name}.npz", partial(_forward, loaded, of_rows, layers))
        with np.load(parts / f"{name}.npz") as arrays:
            documents.loc[rows, "query_perplexity"] = arrays["perplexity"]
            for layer in layers:
                if layer not in vectors:  # a text without tokens keeps a row without direction
                    vectors[layer] = np.full(
                        (len(entries), arrays[layer].shape[1]), np.nan, dtype=np.float32
                    )
                vectors[layer][rows] = arrays[layer]
    manifest = {
        "model": loaded.name,
        "revision": loaded.revision,
        "depth": depth(loaded.model.config),
        "model_args": {"dtype": str(next(loaded.model.parameters()).dtype).removeprefix("torch.")},
        "tasks": {task: None},
        "num_fewshot": 0,
        "chat_template": None,
        "prompt_format": "plain texts",
        "identity": identity,
        "limit": None,
        "versions": {"torch": torch.__version__},
    }
    write_store(output, documents=documents, vectors=vectors, manifest=manifest)
    shutil.rmtree(parts)
    return Path(output)


def _forward(
    loaded: LoadedModel, texts: Sequence[list[int]], layers: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """Last-token states (b, d) of every layer and the ``perplexity`` (b,) of every text of one batch."""
    lengths = torch.tensor([len(tokens) for tokens in texts])
    # In a causal model, padding on the right does not affect earlier tokens.
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    ids = torch.full(mask.shape, loaded.tokenizer.pad_token_id)
    ids[mask] = torch.tensor([token for tokens in texts for token in tokens])
    with torch.inference_mode(), capture(loaded.model, layers) as states:
        logits = loaded.model(
            input_ids=ids.to(loaded.device),
            attention_mask=mask.long().to(loaded.device),
            use_cache=False,
        ).logits
        rows = {
            layer: state[torch.arange(len(texts)), (lengths - 1).to(state.device)]
            .float()
            .cpu()
            .numpy()
            for layer, state in states.items()
        }
        found = [
            _perplexity(logits[i, : n - 1], ids[i, 1:n]) for i, n in enumerate(lengths.tolist())
        ]
    return {**rows, "perplexity": np.array(found)}


def _perplexity(logits: torch.Tensor, following: torch.Tensor) -> float:
    if not len(following):
        return math.nan
    loss = torch.nn.functional.cross_entropy(logits.float(), following.to(logits.device))
    return float(torch.exp(loss))


def _batches(encoded: list[tuple[int, list[int]]]) -> Iterator[list[tuple[int, list[int]]]]:
    """Batches of rows and tokens of similar length, of about `_TOKENS` tokens with padding at most."""
    batch: list[tuple[int, list[int]]] = []
    for row, ids in sorted(encoded, key=lambda text: (len(text[1]), text[0])):
        if batch and len(ids) * (len(batch) + 1) > _TOKENS:
            yield batch
            batch = []
        batch.append((row, ids))
    yield batch


def _longest(loaded: LoadedModel) -> int:
    config = loaded.model.config
    text_config = getattr(config, "text_config", None) or config
    known = [
        getattr(text_config, "max_position_embeddings", None),
        loaded.tokenizer.model_max_length,
    ]
    return min([int(n) for n in known if n and 0 < n < 10**6], default=2048)  # 1e30: no limit


def _with_columns(documents: pd.DataFrame, texts: Texts) -> pd.DataFrame:
    """The documents with the other columns of their file; ``doc_id`` is the position in the file."""
    if texts.path is None or texts.continuous:
        return documents
    if texts.path.suffix == ".parquet":
        frame = pd.read_parquet(texts.path)
    else:
        frame = pd.DataFrame([row or {} for row in texts.objects()])
    frame = frame.iloc[documents["doc_id"].to_numpy()].reset_index(drop=True)
    for name in frame.columns.difference(
        [*documents.drop(columns=["task", "doc_hash"]), texts.column], sort=False
    ):
        plain = frame[name].map(
            lambda value: value is None or isinstance(value, str | bool | int | float)
        )
        if plain.all() or name in COLUMNS:
            documents[str(name)] = frame[name]
    if "correct" in documents:
        scores = pd.to_numeric(documents["correct"], errors="coerce").astype(float)
        if (scores.isna() & documents["correct"].notna()).any() or not scores.dropna().between(
            0, 1
        ).all():
            raise UsageError(
                f"expected numbers in [0, 1] in the column `correct` of {texts.source}"
            )
        documents["correct"] = scores
    return documents
