"""Texts as blocks of tokens, all of one length, kept on disk so that a resumed arm sees the same ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.training.settings import Settings

Blocks = NDArray[np.int32]


def domain_blocks(settings: Settings, folder: Path, tokenizer: Any) -> list[tuple[Blocks, Blocks]]:
    """Training and evaluation blocks of each domain, (n, block) and (m, block) int32.

    No more texts are read than an arm needs; documents are joined by the end-of-text token and cut without
    regard to their ends, as in the papers' training.

    Raises:
        UsageError: A source cannot be read, or is too short for one block of each kind.
    """
    found = []
    share = settings.tokens // len(settings.domains) + 1
    held = -(-settings.eval_tokens // settings.block)
    for number, (source, eval_source) in enumerate(settings.domains):
        path = folder / f"blocks-{number}.npz"
        if not path.is_file():
            need = -(-share // settings.block)
            if eval_source:
                train = text_blocks(settings, source, tokenizer, need)
                held_out = text_blocks(settings, eval_source, tokenizer, held)
            else:
                both = text_blocks(settings, source, tokenizer, need + held)
                # A short source gives at most a fifth away.
                cut = min(held, max(1, len(both) // 5))
                train, held_out = both[:-cut], both[-cut:]
            if not len(train) or not len(held_out):
                raise UsageError(
                    f"expected at least two blocks of {settings.block} tokens in {source}, got "
                    f"{len(train) + len(held_out)}; pass more text or a smaller --block"
                )
            partial = path.with_suffix(".partial.npz")
            np.savez(partial, train=train, held_out=held_out)
            os.replace(partial, path)
        with np.load(path) as stored:
            found.append((stored["train"], stored["held_out"]))
    return found


def mixed(domains: list[Blocks]) -> list[dict[str, Any]]:
    """Training rows with their domain; with two domains as many of each as the smaller has."""
    least = min(len(blocks) for blocks in domains)
    rows = []
    for i in range(least if len(domains) > 1 else len(domains[0])):
        for number, blocks in enumerate(domains):
            ids = blocks[i].astype(np.int64)
            rows.append({"input_ids": ids, "labels": ids, "domains": number})
    return rows


def text_blocks(settings: Settings, source: str, tokenizer: Any, most: int) -> Blocks:
    """The first blocks of a source, at most ``most`` of them, (n, settings.block) int32."""
    texts = Texts(source, column=settings.column, config=settings.data_config, split=settings.split)
    end = tokenizer.eos_token_id
    ids: list[int] = []
    document = None
    for text in texts:
        if document is not None and text.document == document:
            ids += tokenizer("\n\n", add_special_tokens=False)["input_ids"]
        elif document is not None and end is not None:
            ids.append(end)
        document = text.document
        ids += tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= most * settings.block:
            break
    whole = min(most, len(ids) // settings.block)
    return np.array(ids[: whole * settings.block], dtype=np.int32).reshape(whole, settings.block)
