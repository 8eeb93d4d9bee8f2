"""The scale of a checkpoint as the field names it, from its parameter count."""

from __future__ import annotations

import math

# Sizes that names commonly carry, in billions. A count within 4 % of one is given its name, so that
# siblings with padded vocabularies or extra heads stay in one group.
_NAMED = (
    *(0.5, 0.6, 1.0, 1.3, 1.5, 1.7, 2.0, 3.0, 4.0, 7.0, 8.0, 9.0, 13.0, 14.0, 20.0, 27.0, 30.0, 32.0),
    *(34.0, 40.0, 65.0, 70.0, 72.0, 104.0, 110.0, 123.0, 180.0, 235.0, 405.0, 671.0),
)


def scale_name(parameters: int | None, vocabulary_matrix: int = 0) -> str:
    """Name of a size, such as ``0.5B``, ``1.5B``, ``7B`` or ``160M``; ``unknown`` without a count.

    Args:
        parameters: All parameters of the checkpoint, or None.
        vocabulary_matrix: Parameters of the second vocabulary matrix, where input and output embedding are
            stored apart. They are not counted: names follow the model without it (Qwen2.5-7B stores
            7.62 billion), and a distilled sibling that was untied stays in its group.

    >>> scale_name(7_615_616_512, 152064 * 3584), scale_name(494_032_768)
    ('7B', '0.5B')
    >>> scale_name(1_777_088_000, 151936 * 1536)
    '1.5B'
    """
    if parameters is None:
        return "unknown"
    count = (parameters - vocabulary_matrix) / 1e9
    if count <= 0:
        return "unknown"
    nearest = min(_NAMED, key=lambda size: abs(math.log(count / size)))
    if abs(count / nearest - 1) <= 0.04:
        return f"{nearest:g}B"
    if count >= 2:
        return f"{round(count)}B"
    if count >= 0.95:
        return f"{count:.1f}B"
    unit, name = (1e6, "M") if count >= 1e-3 else (1e3, "K")
    value = count * 1e9 / unit
    return f"{float(f'{value:.2g}'):g}{name}"
