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
    """Return the canonical names of the layers chosen in ``layers``, each once, earliest first.

    Only states after a decoder block can be chosen: ``layer.K`` and ``last``.

    Args:
        layers: Names of layers, indices of blocks, or the words ``all``, ``early_half`` and
            ``late_half`` (all blocks, or the first or second half of them), in a list or separated
            by commas.
        blocks: Number of the model's decoder blocks.

    Raises:
        UsageError: A name is not that of a state after a block, an index is out of range, or
            nothing is chosen.

    >>> states_after_blocks("late_half", 4)
    ['layer.2', 'last']
    >>> states_after_blocks("last, layer.-1, 0", 4)
    ['layer.0', 'layer.3', 'last']
    """
    if isinstance(layers, str):
        layers = layers.split(",")
    elif isinstance(layers, int):
        layers = [layers]
    chosen: set[int] = set()  # indices of blocks, and their number for `last`
    for name in layers:
        chosen |= _states(str(name).strip(), blocks)
    if not chosen:
        raise _unknown_layer("none", blocks)
    return ["last" if index == blocks else f"layer.{index}" for index in sorted(chosen)]


def _states(name: str, blocks: int) -> set[int]:
    """The indices of the blocks that a name, a word or an index chooses, and ``blocks`` for ``last``."""
    match = NAME.fullmatch(name)
    if match and match[2] != "attn" and -blocks <= int(match[1]) < blocks:
        return {int(match[1]) % blocks}
    half = max(1, blocks // 2)
    chosen = {
        "last": range(blocks - 1, blocks),
        "all": range(blocks),
        "early_half": range(half),
        "late_half": range(min(half, blocks - 1), blocks),
    }.get(name)
    if chosen is None:
        if not re.fullmatch(r"-?\d+", name) or not -blocks <= int(name) < blocks:
            raise _unknown_layer(repr(name), blocks)
        chosen = range(int(name) % blocks, int(name) % blocks + 1)
    return {blocks if index == blocks - 1 else index for index in chosen}


def _unknown_layer(given: str, blocks: int) -> UsageError:
    return UsageError(
        f"expected layers among last, {', '.join(WORDS)}, layer.K or K with K from {-blocks} to "
        f"{blocks - 1}; got {given}"
    )
