"""G by the public function equals a plain float64 computation on the full matrix, however it is stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from hub_client import FORMATS, full_matrix, gap_of
from lmeval_screener import screen
from lmeval_screener.weights.architectures import EMBEDDINGS, HEADS, WRAPPERS
from token_cases import DATA, vocabulary

from lmeval_dispersion.geometry import METRICS

D = 8
#: Beside each: what has a word of a head or an embedding in its name, and is neither.
OTHERS = [
    *("model.norm.weight", "visual.embed_tokens.weight", "mtp.lm_head.weight"),
    *("model.layers.0.lm_head.weight", "model.layers.0.embed_tokens.weight"),
]


def variants():
    """Label → tensors' names (the last is read), dtype, shards, config."""
    untied, tied = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
    by_default = {"model_type": "our_own"}  # of a known class only its own names are read
    embedding = "model.embed_tokens.weight"
    for name in HEADS:
        yield f"head {name}", [embedding, name], "F32", 1, untied
    for name in EMBEDDINGS:
        yield f"tied {name}", [name], "F32", 1, by_default
    for wrapper in WRAPPERS[1:]:
        yield (
            f"wrapped {wrapper}",
            [wrapper + embedding, f"{wrapper}lm_head.weight"],
            "F32",
            2,
            untied,
        )
        yield f"wrapped and tied {wrapper}", [wrapper + embedding], "F32", 1, {"text_config": tied}
    for dtype in FORMATS:
        for shards in (1, 2, 3):
            yield f"{dtype} in {shards}", [embedding, "lm_head.weight"], dtype, shards, untied


def test_gaps_equal_the_full_matrix_for_every_naming_dtype_and_sharding(tmp_path):
    tokenizer, v = (DATA / "smollm2.json").read_bytes(), vocabulary("smollm2").size
    draw, expected = np.random.default_rng(0), {}
    for number, (label, names, dtype, shards, config) in enumerate(variants()):
        tensors = {name: ("F32", draw.normal(size=(4, D))) for name in OTHERS}
        tensors |= {name: (dtype, draw.normal(size=(v, D)) + 0.2) for name in names}
        config = {"model_type": "our_own", **config}
        folder = tmp_path / f"{number:02d}"
        write_checkpoint(folder, tensors, config=config, shards=shards, tokenizer=tokenizer)
        expected[str(folder)] = label, names[-1]
    result = screen(expected, domain="math")
    assert not result.failed
    assert len(result.checkpoints) == len(expected)
    for c in result.checkpoints:
        label, tensor = expected[c.repo]
        assert (c.tensor, c.notes) == (tensor, ()), label
        matrix = full_matrix(Path(c.repo) / c.file, c.tensor)
        for metric in METRICS:
            # Numbers of 64 bits are rounded to 32.
            right = pytest.approx(gap_of(matrix, c, metric), abs=1e-7 if c.dtype == "F64" else 1e-9)
            assert c.gaps[metric].mean == right, (label, metric)
