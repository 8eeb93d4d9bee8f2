"""A language model: loading, texts, states by layer, and the names of layers.

Public are ``load_model`` and ``capture``, as names of :mod:`lmeval_dispersion`. Its modules are private.

A name means one state: ``last``, ``norm``, ``embeddings``, ``layer.K``, ``layer.K.attn`` or
``layer.K.ffn`` (definitions: :mod:`lmeval_dispersion.model.capture`). Where states after several blocks can
be chosen, words and bare indices work too:

==============  ===========================================================================================
``all``         the state after every block
``early_half``  the state after every block of the first half
``late_half``   the state after every block of the second half
``K``           the state after block K: ``layer.K``, but ``last``, after the final norm, for the last block
==============  ===========================================================================================

``all`` and the halves take the last block's state after the final norm as well; ``layer.-1`` takes it before.
This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmeval_dispersion.errors import UsageError

WORDS = ("all", "early_half", "late_half")
NAME = re.compile(r"layer\.(-?\d+)(?:\.(attn|ffn))?")


def states_after_blocks(layers: str | int | Sequence[str | int], blocks: int) -> list[str]:
    """Canonical names of the states after blocks in ``layers``, each once, the earliest first.

    Args:
        layers: Names, words or indices, in a list or separated by commas.
        blocks: Number of the model's blocks.

    Raises:
        UsageError: A name is not a state after a block, an index is out of range, or nothing is chosen.

    >>> states_after_blocks("late_half", 4)
    ['layer.2', 'last']
    >>> states_after_blocks("last, layer.-1, 0", 4)
    ['layer.0', 'layer.3', 'last']
    """
    given = (
        layers.split(",")
        if isinstance(layers, str)
        else [layers]
        if isinstance(layers, int)
        else layers
    )
    names = [name.strip() if isinstance(name, str) else name for name in given]
    which = f"last, {', '.join(WORDS)}, layer.K or K with K from {-blocks} to {blocks - 1}"
    chosen: set[int] = set()  # the index of a block, or their number for `last`
    for name in names:
        text = str(name)
        match = NAME.fullmatch(text)
        index = (
            match[1]
            if match and match[2] != "attn"
            else text
            if re.fullmatch(r"-?\d+", text)
            else None
        )
        if text not in ("last", *WORDS) and (index is None or isinstance(name, bool)):
            raise UsageError(f"expected layers among {which}; got {name!r}")
        half = max(1, blocks // 2)
        if index is None:
            first, end = {
                "last": (blocks - 1, blocks),
                "all": (0, blocks),
                "early_half": (0, half),
                "late_half": (min(half, blocks - 1), blocks),
            }[text]
        elif -blocks <= int(index) < blocks:
            first, end = int(index) % blocks, int(index) % blocks + 1
        else:
            raise UsageError(f"expected layers among {which}; got {name!r}")
        chosen |= {blocks if k == blocks - 1 and not match else k for k in range(first, end)}
    if not names:
        raise UsageError(f"expected layers among {which}; got none")
    return ["last" if k == blocks else f"layer.{k}" for k in sorted(chosen)]
