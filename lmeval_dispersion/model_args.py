"""``--model_args``: the one reading of ``K=V,K=V``."""

from __future__ import annotations

from lmeval_dispersion.errors import UsageError


def key_values(text: str, *, check: bool = True) -> dict[str, str]:
    """The pairs of ``K=V,K=V`` as text by name; without ``check`` a key alone has an empty value.

    Raises:
        UsageError: A pair without ``=``, or a key twice.
    """
    given: dict[str, str] = {}
    for pair in filter(str.strip, text.split(",")):
        name, equals, value = pair.partition("=")
        key = name.strip()
        if check and not (key and equals):
            raise UsageError(f"expected K=V,K=V, got {pair.strip()!r}", argument="model_args")
        if check and key in given:
            raise UsageError(f"expected each key once, got {text}", argument="model_args")
        given[key] = value.strip()
    return given
