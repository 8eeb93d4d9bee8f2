"""The words and figures that every output format shares."""

from __future__ import annotations

from collections.abc import Sequence

from screener.result import Group, Result, Screened

UNSUPPORTED = (
    "G compares checkpoints of one tokenizer and one scale. It does not compare across scales or families, and it "
    "predicts no accuracy."
)
ACROSS_SCALES = (
    "One order over all groups. The evidence does not support it: in the source paper's own tables G does not rank "
    "across scales (Spearman 0.14 with accuracy for the cosine gap over eight checkpoints)."
)


def size(count: int) -> str:
    """Bytes for people: ``812 B``, ``1.31 MB``."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            break
        if unit != "GB":
            value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def figure(mean: float, se: float, digits: int) -> str:
    """``1.256 ± 0.021``."""
    return f"{mean:.{digits}f} ± {se:.{digits}f}"


def digits_for(checkpoints: Sequence[Screened], result: Result) -> int:
    """Decimals at which the smallest error of G still shows two digits; 3 to 6."""
    errors = [c.gaps[result.metric].se for c in checkpoints if c.gaps[result.metric].se > 0]
    digits = 3
    while errors and digits < 6 and min(errors) * 10**digits < 10:
        digits += 1
    return digits


def not_separated(checkpoint: Screened, group: Group) -> str:
    """The ranks of the siblings that a checkpoint is not separated from: ``2, 3``."""
    others = [c for c in group.checkpoints if c.label in checkpoint.not_separated_from]
    return ", ".join(str(c.rank) for c in others)


def heading(group: Group) -> str:
    """``qwen2.5 · 7B`` with the number of checkpoints."""
    n = len(group.checkpoints)
    return f"{group.family} · {group.scale} · {n} checkpoint{'s' if n != 1 else ''}"


def tokens_line(group: Group) -> str:
    """What was compared: counts, digit scheme, dropped words."""
    tokens = group.checkpoints[0].tokens
    text = f"T: {tokens.domain} tokens, R: {tokens.reference} tokens; digits: {tokens.digit_scheme}"
    if tokens.dropped:
        text += f"; no single token, so not compared: {', '.join(word.strip() for word in tokens.dropped)}"
    return text


def read_line(result: Result) -> str:
    """What the whole screening cost."""
    n = len(result.checkpoints)
    return (
        f"{n} screened, {len(result.failed)} failed; read {size(result.bytes_read)} in {result.requests} requests, "
        f"{result.seconds:.2f} s"
    )
