"""``--model_args``: the one reading of ``K=V,K=V``."""

from __future__ import annotations

from lmeval_dispersion.errors import UsageError


def key_values(text: str, *, check: bool = True) -> dict[str, str]:
    """The pairs of ``K=V,K=V`` as text by name; without ``check`` a key alone has an empty value.

    Raises:
        UsageError: A pair without ``=``, or a key twice.
    """
    pairs = [pair.strip().partition("=") for pair in text.split(",") if pair.strip()]
    given = {key.strip(): value.strip() for key, _, value in pairs}
    for key, equals, value in pairs if check else ():
        if not equals or not key.strip():
            raise UsageError(
                f"expected K=V,K=V, got {key + equals + value!r}", argument="model_args"
            )
    if check and len(given) < len(pairs):
        raise UsageError(f"expected each key once, got {text}", argument="model_args")
    return given
