"""One grammar of layers: words, names and indices against the states that they stand for."""

import pytest

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.model import states_after_blocks


@pytest.mark.parametrize(
    ("layers", "blocks", "names"),
    [
        ("early_half", 5, ["layer.0", "layer.1"]),
        ("late_half", 5, ["layer.2", "layer.3", "last"]),
        ("early_half", 1, ["last"]),
        ("late_half", 1, ["last"]),
        ("all", 3, ["layer.0", "layer.1", "last"]),
        ([-1, 0, 4], 5, ["layer.0", "last"]),
        (1, 3, ["layer.1"]),
        ("2,0, 1", 3, ["layer.0", "layer.1", "last"]),
        ("last,layer.-1", 3, ["layer.2", "last"]),
        (["layer.0.ffn", "layer.-3", 0], 3, ["layer.0"]),
        ("early_half,last", 4, ["layer.0", "layer.1", "last"]),
    ],
)
def test_states_after_blocks(layers, blocks, names):
    assert states_after_blocks(layers, blocks) == names


def test_other_names_and_blocks_that_are_not_there_are_refused():
    for layers in ("middle", "", [], [True], ["last", 1.5], "embeddings", "layer.0.attn"):
        with pytest.raises(UsageError, match=r"among last, all, early_half, late_half, layer\.K"):
            states_after_blocks(layers, 3)
    for layers in ([3], "-4", "layer.3", "last,layer.-4"):
        with pytest.raises(UsageError, match="from -3 to 2; got"):
            states_after_blocks(layers, 3)
