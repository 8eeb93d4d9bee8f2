"""Reading of ``--model_args``, written as ``K=V,K=V``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmeval_dispersion.errors import UsageError


def key_values(text: str, *, check: bool = True) -> dict[str, str]:
    """Return the values of ``K=V,K=V`` by key, as texts.

    Without ``check`` nothing is raised: a key without ``=`` has an empty value, and of equal keys
    the last one counts.

    Raises:
        UsageError: A pair has no key or no ``=``, or a key occurs twice.
    """
    given: dict[str, str] = {}
    for pair in filter(str.strip, text.split(",")):
        name, equals, value = pair.partition("=")
        key = name.strip()
        if check and not (key and equals):
            raise UsageError(f"expected K=V,K=V, got {pair.strip()!r}", argument="model_args")
        if check and key in given:
            raise UsageError(
                f"expected each key once, got {text}; give {key} once", argument="model_args"
            )
        given[key] = value.strip()
    return given


def arguments_in(given: object) -> Mapping[str, Any]:
    """Return arguments that lm-eval holds as a mapping or as a text ``K=V,K=V``; empty for others."""
    if isinstance(given, str):
        return key_values(given, check=False)
    return given if isinstance(given, Mapping) else {}
