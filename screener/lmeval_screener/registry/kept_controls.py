"""Gauge controls as text, as a registry keeps them: every number is the same when it is read again."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from lmeval_screener.ranking.controls import Control, Controls, RandomTokens


def controls_text(found: Controls | str) -> str:
    """Controls as JSON; a sentence stands where they, or one of them, could not be read."""
    if isinstance(found, str):
        return json.dumps(found)
    # Python writes the shortest digits that stand for a float, so nothing is lost.
    return json.dumps(
        {
            "centred": _plain(found.centred),
            "final_norm": _plain(found.final_norm),
            "sample": found.sample,
            "tensor": found.tensor,
            "row_norm": found.row_norm,
            "effective_rank": found.effective_rank,
            "random_tokens": (
                found.random_tokens if isinstance(found.random_tokens, str) else asdict(found.random_tokens)
            ),
        },
        separators=(",", ":"),
    )


def controls_of(text: str) -> Controls | str:
    """What :func:`controls_text` wrote."""
    found = json.loads(text)
    if isinstance(found, str):
        return found
    null = found["random_tokens"]
    return Controls(
        _control(found["centred"]),
        _control(found["final_norm"]),
        found["sample"],
        found["tensor"],
        found["row_norm"],
        found["effective_rank"],
        null if isinstance(null, str) else RandomTokens(**null),
    )


def complete(text: str) -> bool:
    """Whether every control is a figure, none a sentence that says why there is none."""
    found = json.loads(text)
    names = ("centred", "final_norm", "effective_rank", "random_tokens")
    return not isinstance(found, str) and not any(isinstance(found[name], str) for name in names)


def _plain(one: Control | str) -> Any:
    if isinstance(one, str):
        return one
    return {
        "mean": one.mean,
        "se": one.se,
        "left_out_domain": one.left_out_domain.tolist(),
        "left_out_reference": one.left_out_reference.tolist(),
    }


def _control(found: Any) -> Control | str:
    if isinstance(found, str):
        return found
    return Control(
        found["mean"],
        found["se"],
        np.array(found["left_out_domain"], dtype=np.float64),
        np.array(found["left_out_reference"], dtype=np.float64),
    )
