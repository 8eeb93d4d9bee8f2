"""Both figures against slow computations; copies of a model that predict the same never have an order."""

from __future__ import annotations

import math
from functools import partial

import gguf_files
import numpy as np
import pytest
from checkpoints import slow_gap, write_checkpoint
from lmeval_screener import screen
from lmeval_screener.figures import difference, gap, gaps, ratio
from lmeval_screener.tokens.resolution import resolve_tokens
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from lmeval_screener.weights.projection import FinalNorm
from token_cases import REFERENCE, tokenizer_json

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.geometry import METRICS


def mean_distance(rows):
    return np.linalg.norm(rows[:, None] - rows[None], axis=2)[np.triu_indices(len(rows), 1)].mean()


def sample():
    draw = np.random.default_rng(0)
    return draw.normal(size=(10, 24)) + 0.4, draw.normal(size=(30, 24)) + 0.4


def left_out(figure, t, r):
    """A figure without each token of T, then without each of R."""
    of_domain = [figure(np.delete(t, i, 0), r) for i in range(len(t))]
    return np.array(of_domain), np.array([figure(t, np.delete(r, i, 0)) for i in range(len(r))])


@pytest.mark.parametrize("figure", [*METRICS, "ratio"])
def test_a_figure_and_its_jackknife_against_leaving_tokens_out_by_hand(figure):
    t, r = sample()
    gamma = np.random.default_rng(9).uniform(0.5, 2, size=24)
    if figure == "ratio":
        found = ratio(t, r, FinalNorm("n", gamma, "rms"), "F32")

        def slow(t, r):
            return mean_distance(t * gamma) / mean_distance(r * gamma)
    else:
        found, slow = gap(t, r, figure), partial(slow_gap, metric=figure)
        assert (
            found.mean == found.within_domain.mean + found.between.mean
        )  # the control is no part of it
        assert gaps(t, r)["euclidean"].within_reference.mean == pytest.approx(mean_distance(r))
    assert found.mean == pytest.approx(slow(t, r))
    sides = left_out(slow, t, r)
    np.testing.assert_allclose(found.left_out_domain, sides[0])
    np.testing.assert_allclose(found.left_out_reference, sides[1])
    variance = sum((len(v) - 1) / len(v) * np.square(v - np.mean(v)).sum() for v in sides)
    assert found.se == pytest.approx(math.sqrt(variance))


def test_a_paired_difference_against_leaving_tokens_out_by_hand():
    t, r = sample()
    moved = t + np.random.default_rng(1).normal(size=t.shape) * 0.05 + 0.02
    a, b = gap(t, r), gap(moved, r)
    found = difference(b, a)
    assert found.mean == pytest.approx(slow_gap(moved, r) - slow_gap(t, r))
    before, after = left_out(slow_gap, t, r), left_out(slow_gap, moved, r)
    sides = after[0] - before[0], after[1] - before[1]
    parts = [(len(v) - 1) / len(v) * np.square(v - v.mean()).sum() for v in sides]
    assert found.se == pytest.approx(math.sqrt(sum(parts)))
    # Only T changed, but leaving a reference token out moves both gaps by nearly the same.
    assert found.se < 0.5 * math.hypot(a.se, b.se)
    assert found.freedom == len(t) - 1  # T has fewer tokens


def test_the_same_rows_are_not_separated_and_a_spread_domain_is():
    t, r = sample()
    assert difference(gap(t, r), gap(t * 3, r * 0.5)).p > 0.05
    spread = difference(gap(t - t.mean(axis=0), r), gap(t, r))
    assert spread.p < 0.05
    assert spread.mean > 0
    for other in (gap(t, r, "euclidean"), gap(t[:9], r), gap(t, r[:20])):
        with pytest.raises(GeometryError, match="same tokens"):
            difference(gap(t, r), other)


# --- copies that predict the same -----------------------------------------------------------------------

V, D = 420, 64
SETS = load_token_set("math"), REFERENCE
WORDS = [text for words in SETS for group in words.groups.values() for text in group.texts()]
PIECES = {text.replace(" ", "Ġ"): 3 * i for i, text in enumerate(WORDS)}
TOKENS_BY_ROW = [
    {row: piece for piece, row in PIECES.items()}.get(i, f"filler{i}") for i in range(V)
]
TOKENIZER = tokenizer_json(
    PIECES | {f"Ġfiller{i}": i for i in range(V) if i % 3 or i >= 3 * len(WORDS)}
)
TOKENS = resolve_tokens(*SETS, Vocabulary.from_tokenizer_json(TOKENIZER))
T, R = TOKENS.domain_ids, TOKENS.reference_ids
DRAW = np.random.default_rng(0)
GAMMA = DRAW.uniform(0.5, 2.0, size=D)
HEAD = DRAW.normal(size=(V, D)) + 0.8 * DRAW.normal(size=D)
HEAD[T] = 0.5 * HEAD[T] + DRAW.normal(size=D)
# Softmax sees row · (γ ∘ x): a vector added to all rows, a scale that γ takes back, and a rotation of the
# normed state, which only an RMSNorm without weight lets through.
VECTOR = 3 * DRAW.normal(size=D)
SCALE = DRAW.uniform(0.2, 5.0, size=D)
ROTATION = np.linalg.qr(DRAW.normal(size=(D, D)))[0]
CONSTANTS = 2 * DRAW.normal(size=(V, 1)) / GAMMA
SAME = {
    "vector": (HEAD + VECTOR, GAMMA),
    "scale": (HEAD * SCALE, GAMMA / SCALE),
    "both": ((HEAD + VECTOR) * SCALE, GAMMA / SCALE),
    "times two": (HEAD * 2, GAMMA / 2),
    "folded": (HEAD * GAMMA, np.ones(D)),
}
OF_NORM = {"rms": ((HEAD * GAMMA) @ ROTATION, np.ones(D)), "layer": (HEAD + CONSTANTS, GAMMA)}


def write(folder, kind, dtype, norm, head, gamma):
    """One checkpoint in a format; returns what is screened."""
    if kind == "gguf":
        folder.mkdir()
        weights = {
            "output.weight": (dtype, head.astype("<f4")),
            "output_norm.weight": ("F32", gamma),
        }
        weights |= {"output_norm.bias": ("F32", np.zeros(D))} if norm == "layer" else {}
        architecture = "llama" if norm == "rms" else "stablelm"
        gguf_files.write(
            folder / "m.gguf", weights, architecture=architecture, tokens=TOKENS_BY_ROW
        )
        return str(folder / "m.gguf")
    config = {"model_type": "llama" if norm == "rms" else "stablelm", "tie_word_embeddings": False}
    tensors = {"model.embed_tokens.weight": (dtype, rounded(HEAD, dtype))}
    tensors["lm_head.weight"] = (dtype, rounded(head, dtype))
    tensors["model.norm.weight"] = (dtype, rounded(gamma, dtype))
    if norm == "layer":
        tensors["model.norm.bias"] = ("F32", np.zeros(D))
    write_checkpoint(folder, tensors, config=config, tokenizer=TOKENIZER)
    if kind == "bin":
        torch = pytest.importorskip("torch")
        load_file = pytest.importorskip("safetensors.torch").load_file
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return str(folder)


def rounded(values, dtype="BF16"):
    """Rounded to nearest, as trainers store; the writer cuts off."""
    if dtype != "BF16":
        return values
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view("<f4")


def test_without_a_known_norm_g_stands_alone_no_copy_is_claimed_and_the_report_says_so(tmp_path):
    heads = {"a": HEAD + VECTOR, "b": HEAD, "copy": HEAD}
    for name, head in heads.items():
        write_checkpoint(tmp_path / name, {"lm_head.weight": ("F32", head)}, tokenizer=TOKENIZER)
    result = screen([str(tmp_path / name) for name in heads])
    assert {(c.ratio, c.copy_of) for c in result.checkpoints} == {(None, None)}
    reason = "no final norm with a known name is stored"
    assert f"No ratio: {reason}; the order is by G alone." in (report := result.to_markdown())
    assert "Higher G ranks first." in report
    assert {c["ratio"]["reason"] for c in result.to_dict()["checkpoints"]} == {reason}


def test_rounding_is_as_large_as_what_storing_moves():
    draw = np.random.default_rng(7)
    domain, reference = draw.normal(size=(10, 512)), draw.normal(size=(80, 512))
    exact = ratio(domain, reference, FinalNorm("n", np.ones(512), "rms"), "F32")
    moved = []
    for _ in range(30):
        vector = 20 * draw.normal(size=512)
        parts = [rounded(rows + vector, "BF16").astype(float) for rows in (domain, reference)]
        stored = ratio(*parts, FinalNorm("n", np.ones(512), "rms"), "BF16")
        moved.append(abs(stored.mean - exact.mean))
        assert moved[-1] < stored.rounding
    assert max(moved) > stored.rounding / 20
