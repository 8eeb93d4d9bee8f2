"""G by the public function equals a plain float64 computation on the full matrix, however it is stored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from hub_client import FORMATS, full_matrix
from lmeval_screener.tokens import load_token_set, resolve
from lmeval_screener.tokens.vocabulary import Vocabulary
from lmeval_screener.weights.architectures import EMBEDDINGS, HEADS, WRAPPERS

HERE = Path(__file__).parent
TOKENIZER = HERE.parent / "data" / "tokenizers" / "smollm2.json"
D = 8
SCREEN = """
import json, sys
from lmeval_screener import screen

if __name__ == "__main__":
    result = screen(sys.argv[1:], domain="math")
    found = {c.repo: [c.gaps[m].mean for m in ("cosine", "euclidean")] for c in result.checkpoints}
    print(json.dumps([found, [[f.repo, f.message] for f in result.failed]]))
"""


def ids():
    vocabulary = Vocabulary.from_file("tokenizer.json", TOKENIZER.read_bytes())
    found = resolve(load_token_set("math", "domain"), load_token_set("reference", "reference"), vocabulary)
    return found.domain_ids, found.reference_ids


def plain_gaps(matrix, domain, reference):
    """Mean distance inside the domain plus mean distance to the reference, from every pair of rows."""
    inside = np.triu_indices(len(domain), 1)
    gaps = []
    for rows in (matrix / np.linalg.norm(matrix, axis=1, keepdims=True), matrix):
        t, r = rows[domain], rows[reference]
        within, between = (np.linalg.norm(t[:, None] - other[None], axis=2) for other in (t, r))
        if rows is not matrix:
            within, between = within**2 / 2, between**2 / 2  # 1 − cosine of unit vectors
        gaps.append(within[inside].mean() + between.mean())
    return gaps


def variants():
    """Label → tensors' names (the last is read), dtype, shards, config."""
    untied, tied = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
    embedding = "model.embed_tokens.weight"
    for name in HEADS:
        yield f"head {name}", [embedding, name], "F32", 1, untied
    for name in EMBEDDINGS:
        yield f"tied {name}", [name], "F32", 1, tied
    for wrapper in WRAPPERS[1:]:
        yield f"wrapped {wrapper}", [wrapper + embedding, f"{wrapper}lm_head.weight"], "F32", 2, untied
        yield f"wrapped and tied {wrapper}", [wrapper + embedding], "F32", 1, {"text_config": tied}
    for dtype in FORMATS:
        for shards in (1, 2, 3):
            yield f"{dtype} in {shards}", [embedding, "lm_head.weight"], dtype, shards, untied


def test_gaps_equal_the_full_matrix_for_every_naming_dtype_and_sharding(tmp_path):
    domain, reference = ids()
    v = max(*domain, *reference) + 3
    draw, expected = np.random.default_rng(0), {}
    for number, (label, names, dtype, shards, config) in enumerate(variants()):
        folder = tmp_path / f"{number:02d}"
        tensors = {"first.norm.weight": ("F32", draw.normal(size=D))}
        tensors |= {name: (dtype, draw.normal(size=(v, D)) + 0.2) for name in names}
        write_checkpoint(folder, tensors, config={"model_type": "llama", **config}, shards=shards)
        shutil.copy(TOKENIZER, folder / "tokenizer.json")
        (file,) = [f for f in folder.glob("*.safetensors") if names[-1].encode() in f.read_bytes()[:1000]]
        matrix = full_matrix(file, names[-1]).astype(np.float32)  # exact for all dtypes but F64
        expected[str(folder)] = label, plain_gaps(matrix.astype(float), domain, reference)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env |= {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCREEN, *expected], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    found, failed = json.loads(done.stdout)
    assert failed == []
    assert set(found) == set(expected)
    for folder, (label, gaps) in expected.items():
        assert found[folder] == pytest.approx(gaps, abs=1e-9), label
