"""``dispersion embed MODEL FILE``: a store from plain texts, without lm-eval.

The vector of a document is the state at its last token; its perplexity is that of its tokens after
the first. Columns of a JSONL or parquet file are kept: the file may have labels (``correct``) and
slices.
"""

from __future__ import annotations

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
from torch.nn.utils.rnn import pad_sequence

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.files import hashed, keep_arrays
from lmeval_dispersion.harness.arguments import Embedding
from lmeval_dispersion.model.capture import capture, depth, resolve, split_names
from lmeval_dispersion.model.loading import LoadedModel, chosen_model, loaded_model
from lmeval_dispersion.model.texts import SourceText, Texts
from lmeval_dispersion.store import COLUMNS, write_store
from lmeval_dispersion.store.format import PARTS, make_folder

_TOKENS = 2048  # tokens in a batch, with padding; a killed command loses one batch
_PLAIN = (str, bool, int, float)  # what a column may hold


@takes(Embedding)
def embed(asked: Embedding) -> Path:
    """Run a model over texts, write a store of their hidden states, and return the store's folder.

    The store has one state for each text and each chosen layer: that of the text's last token,
    shape (d,), float32; NaN for a text without tokens. `open_store` and `audit` read the store. If
    a run is killed, calling the function again continues it.

    Raises:
        UsageError: There is no text; the model, a layer or the folder cannot be used as given; or
            the file has a column ``correct`` with other values than numbers from 0 to 1.
    """
    texts = Texts(asked.texts, column=asked.column)
    loaded = loaded_model(chosen_model(asked.model, asked.model_args, asked.device))
    layers = [site.name for site in resolve(loaded.model, split_names(asked.layer))]
    entries = list(texts)
    if not entries:
        raise UsageError(f"{texts.source} contains no text; check the file and the column")
    report = texts.report()
    if report:
        print(report, file=sys.stderr)
    tokens = [loaded.tokenizer(text.text)["input_ids"] for text in entries]
    if not any(tokens):
        raise UsageError(
            f"expected texts with tokens, got none in {texts.source}; check the file and the tokenizer"
        )
    task = asked.tasks or Path(texts.source).name
    longest = _longest(loaded)
    inputs = [ids[-longest:] for ids in tokens]
    documents = _documents(texts, entries, task)
    documents["prompt_tokens"] = list(map(len, inputs))
    documents["truncated"] = documents["prompt_tokens"] < list(map(len, tokens))
    folder = Path(asked.output)
    make_folder(folder)  # before the model runs for hours
    identity = {**loaded.identity, "prompt_template": "plain texts"}
    parts = folder / PARTS
    parts.mkdir(exist_ok=True)
    vectors: dict[str, NDArray[Any]] = {}
    for rows in _batches(inputs):
        batch = [inputs[row] for row in rows]
        name = hashed(json.dumps([identity, layers, batch]))[:24]
        file = parts / f"{name}.npz"
        keep_arrays(file, partial(_forward, loaded, batch, layers))
        with np.load(file) as arrays:
            documents.loc[rows, "query_perplexity"] = arrays["perplexity"]
            for layer in layers:
                states = arrays[layer]
                if layer not in vectors:  # a text without tokens keeps a row without direction
                    shape = (len(entries), states.shape[1])
                    vectors[layer] = np.full(shape, np.nan, dtype=np.float32)
                vectors[layer][rows] = states
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
    write_store(folder, documents=documents, vectors=vectors, manifest=manifest)
    shutil.rmtree(parts)
    return folder


def _documents(texts: Texts, entries: Sequence[SourceText], task: str) -> pd.DataFrame:
    """The store's documents, with the other columns of their file; their perplexities are not known yet."""
    documents = pd.DataFrame(
        {
            "doc_id": [text.id for text in entries],
            "task": task,
            "doc_hash": [hashed(text.text) for text in entries],
            "prompt_tokens": 0,
            "truncated": False,
            "text": [text.text for text in entries],
            "query_perplexity": math.nan,
        }
    )
    return _with_columns(documents, texts)


def _forward(
    loaded: LoadedModel, texts: Sequence[list[int]], layers: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """Last-token states (b, d) of every layer and the ``perplexity`` (b,) of every text of one batch."""
    lengths = torch.tensor(list(map(len, texts)))
    # In a causal model, padding on the right does not affect earlier tokens.
    padding = loaded.tokenizer.pad_token_id
    ids = pad_sequence(list(map(torch.tensor, texts)), batch_first=True, padding_value=padding)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    with torch.inference_mode(), capture(loaded.model, layers) as states:
        logits = loaded.model(
            input_ids=ids.to(loaded.device),
            attention_mask=mask.long().to(loaded.device),
            use_cache=False,
        ).logits
        arrays = {}
        for layer, state in states.items():
            last = state[torch.arange(len(texts)), (lengths - 1).to(state.device)]
            arrays[layer] = last.float().cpu().numpy()
    perplexities = list(map(_perplexity, logits, ids, lengths.tolist()))
    return {**arrays, "perplexity": np.array(perplexities)}


@torch.inference_mode()
def _perplexity(logits: torch.Tensor, ids: torch.Tensor, length: int) -> float:
    """Perplexity of a text's own tokens after its first, by the logits (t, v); NaN without any."""
    following = ids[1:length].to(logits.device)
    if not len(following):
        return math.nan
    loss = torch.nn.functional.cross_entropy(logits[: length - 1].float(), following)
    return float(torch.exp(loss))


def _batches(tokens: Sequence[list[int]]) -> Iterator[list[int]]:
    """Rows of texts of similar length, of about `_TOKENS` tokens with padding at most; none without tokens."""
    batch: list[int] = []
    lengths = list(map(len, tokens))
    for row in sorted(range(len(tokens)), key=lambda row: lengths[row]):
        length = lengths[row]
        if batch and length * (len(batch) + 1) > _TOKENS:
            yield batch
            batch = []
        if length:
            batch.append(row)
    yield batch


def _longest(loaded: LoadedModel) -> int:
    config = loaded.model.config
    text_config = getattr(config, "text_config", None) or config
    limits = (
        getattr(text_config, "max_position_embeddings", None),
        loaded.tokenizer.model_max_length,
    )
    known = [int(limit) for limit in limits if limit and 0 < limit < 10**6]  # 1e30: no limit
    return min(known, default=2048)


def _with_columns(documents: pd.DataFrame, texts: Texts) -> pd.DataFrame:
    """The documents with the other columns of their file; ``doc_id`` is the position in the file."""
    if texts.path is None or texts.continuous:
        return documents
    if texts.path.suffix == ".parquet":
        frame = pd.read_parquet(texts.path)
    else:
        frame = pd.DataFrame([fields or {} for fields in texts.objects()])
    frame = frame.iloc[documents["doc_id"].to_numpy()].reset_index(drop=True)
    taken = {*documents.columns} - {"task", "doc_hash"} | {texts.column}
    for name, values in frame.items():
        plain = values.map(lambda value: value is None or isinstance(value, _PLAIN))
        if name not in taken and (plain.all() or name in COLUMNS):
            documents[str(name)] = values
    if "correct" in documents:
        scores = pd.to_numeric(documents["correct"], errors="coerce").astype(float)
        wrong = documents["correct"].notna() & ~scores.between(0, 1)
        if wrong.any():
            raise UsageError(
                f"expected numbers from 0 to 1 in the column `correct` of {texts.source}, got "
                f"{documents['correct'][wrong].iloc[0]!r}; correct or rename the column"
            )
        documents["correct"] = scores
    return documents
