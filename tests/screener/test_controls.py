"""Gauge controls: against the full matrix in float64, and against what moves no prediction."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from hub_client import full_matrix, ours
from lmeval_screener import screen
from lmeval_screener.checkpoints.http import Budget
from lmeval_screener.ranking.controls import RandomTokens, random_ids, random_tokens
from lmeval_screener.ranking.gap import gap
from lmeval_screener.reading import Reader, control_rows, read_controls
from lmeval_screener.reports.document import controls_section
from lmeval_screener.targets.target import Target
from lmeval_screener.tokens.cache import ResolutionCache
from lmeval_screener.tokens.resolution import resolve
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from token_cases import REFERENCE, tokenizer_json

V, D = 420, 24
LLAMA = {"model_type": "llama", "tie_word_embeddings": False}
SETS = load_token_set("math"), REFERENCE
WORDS = [text for words in SETS for group in words.groups.values() for text in group.texts()]
PIECES = {text.replace(" ", "Ġ"): 3 * i for i, text in enumerate(WORDS)}
TOKENIZER = tokenizer_json(PIECES | {f"Ġfiller{i}": i for i in range(V) if i % 3 or i >= 3 * len(WORDS)})
TOKENS = resolve(*SETS, Vocabulary.from_tokenizer_json(TOKENIZER))
T, R = TOKENS.domain_ids, TOKENS.reference_ids


@pytest.fixture(scope="module")
def head():
    draw = np.random.default_rng(0)
    matrix = draw.normal(size=(V, D)) + 0.8 * draw.normal(size=D)
    matrix[T] += draw.normal(size=D)
    return matrix


@pytest.fixture(scope="module")
def gamma():
    return np.random.default_rng(1).uniform(0.5, 2.0, size=D)


@pytest.fixture
def write(tmp_path):
    def one(name, matrix, weight, *, norm="model.norm.weight", config=LLAMA, dtype="F64", extra=()):
        tensors = {"model.embed_tokens.weight": (dtype, matrix), "lm_head.weight": (dtype, matrix)}
        if weight is not None:
            tensors[norm] = (dtype, weight)
        tensors |= {key: (dtype, np.zeros(D)) for key in extra}
        folder = write_checkpoint(tmp_path / name, tensors, config=config)
        (folder / "tokenizer.json").write_bytes(TOKENIZER)
        return str(folder)

    return one


def found(*folders):
    result = screen(folders, controls=True)
    assert not result.failed, result.failed
    by_name = {c.repo: c for c in result.checkpoints}
    return [by_name[folder] for folder in folders]


def distances(a, b):
    return np.linalg.norm(a[:, None] - b[None], axis=2)


def inside(rows):
    return distances(rows, rows)[np.triu_indices(len(rows), 1)].mean()


def test_both_controls_against_the_full_matrix(head, gamma, write):
    folder = write("a", head, gamma, dtype="BF16")
    matrix = full_matrix(Path(folder) / "model.safetensors", "lm_head.weight")
    weight = (gamma.astype("<f4").view("<u4") >> 16 << 16).astype("<u4").view("<f4").astype(float)
    (one,) = found(folder)
    centred = matrix - matrix[list(TOKENS.sample)].mean(axis=0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    half = distances(unit[T], unit[T])[np.triu_indices(10, 1)] ** 2 / 2
    g = half.mean() + (distances(unit[T], unit[R]) ** 2 / 2).mean()
    assert one.controls.sample == 256
    assert one.controls.centred.mean == pytest.approx(g, abs=1e-9)
    ratio = inside(matrix[T] * weight) / inside(matrix[R] * weight)
    assert one.controls.final_norm.mean == pytest.approx(ratio, abs=1e-9)
    assert one.controls.tensor == "model.norm.weight"
    left = [inside(np.delete(matrix[T], i, 0) * weight) / inside(matrix[R] * weight) for i in range(10)]
    np.testing.assert_allclose(one.controls.final_norm.left_out_domain, left, atol=1e-9)


def test_a_common_vector_moves_g_and_neither_control(head, gamma, write):
    shift = 3 * np.random.default_rng(2).normal(size=D)
    a, b = found(write("a", head, gamma), write("b", head + shift, gamma))
    assert abs(a.gaps["cosine"].mean - b.gaps["cosine"].mean) > 0.2
    assert b.controls.centred.mean == pytest.approx(a.controls.centred.mean, abs=1e-5)
    assert b.controls.final_norm.mean == pytest.approx(a.controls.final_norm.mean, abs=1e-5)


def test_a_scale_between_norm_and_head_moves_the_euclidean_g_and_not_the_ratio(head, gamma, write):
    scale = np.random.default_rng(3).uniform(0.2, 5.0, size=D)
    a, b = found(write("a", head, gamma), write("b", head * scale, gamma / scale))
    assert abs(a.gaps["euclidean"].mean / b.gaps["euclidean"].mean - 1) > 0.2
    assert b.controls.final_norm.mean == pytest.approx(a.controls.final_norm.mean, abs=1e-5)


def test_a_constant_along_the_width_moves_nothing_behind_a_layer_norm(head, gamma, write):
    # A LayerNorm's output sums to 0: c / γ added to a row is seen by no softmax.
    own = np.random.default_rng(4).normal(size=(V, 1)) * 5 / gamma
    bias = ("model.norm.bias",)
    a, b = found(write("a", head, gamma, extra=bias), write("b", head + own, gamma, extra=bias))
    assert b.controls.final_norm.mean == pytest.approx(a.controls.final_norm.mean, abs=1e-4)
    rms_a, rms_b = found(write("c", head, gamma), write("d", head + own, gamma))
    assert abs(rms_b.controls.final_norm.mean - rms_a.controls.final_norm.mean) > 0.05


def test_rows_of_padding_change_nothing(head, gamma, write):
    padded = np.vstack([head, 50 * np.random.default_rng(5).normal(size=(1024, D))])
    a, b = found(write("a", head, gamma), write("b", padded, gamma))
    assert (a.family, a.scale) == (b.family, b.scale)
    for metric in ("cosine", "euclidean"):
        assert a.gaps[metric].mean == b.gaps[metric].mean
    assert a.controls.centred.mean == b.controls.centred.mean
    assert a.controls.final_norm.mean == b.controls.final_norm.mean


@pytest.mark.parametrize(
    ("norm", "config", "factor"),
    [
        ("model.norm.weight", {"model_type": "gemma2"}, lambda g: g + 1),
        ("language_model.model.norm.weight", {"model_type": "gemma3"}, lambda g: g + 1),
        ("gpt_neox.final_layer_norm.weight", {"model_type": "gpt_neox"}, lambda g: g),
        ("transformer.ln_f.weight", {"model_type": "falcon"}, lambda g: g),
        ("model.norm.weight", {"model_type": "qwen3_5_text"}, lambda g: g + 1),
    ],
)
def test_how_architectures_store_their_final_norm(head, gamma, write, norm, config, factor):
    (one,) = found(write("a", head, gamma, norm=norm, config=config | {"tie_word_embeddings": False}))
    ratio = inside(head[T] * factor(gamma)) / inside(head[R] * factor(gamma))
    assert one.controls.final_norm.mean == pytest.approx(ratio, abs=1e-5)
    assert one.controls.tensor == norm


@pytest.mark.parametrize(
    ("weight", "config", "reason"),
    [
        (None, LLAMA, "no final norm of a known name is stored"),
        (np.ones(D + 1), LLAMA, "expected 24 numbers"),
        (np.full(D, np.nan), LLAMA, "zero or not finite"),
        (np.ones(D), {}, "config.json names no model_type"),
        (np.ones(D), {"model_type": "hrm_text"}, "how hrm_text applies its final norm is not known"),
    ],
)
def test_where_the_norm_is_not_known_a_reason_stands(head, write, weight, config, reason):
    folder = write("a", head, weight, config=config)
    result = screen([folder], controls=True)
    (line,) = result.to_dict()["checkpoints"]
    norm = line["controls"]["final_norm"]
    assert (norm["mean"], norm["se"], norm["rank"]) == (None, None, None)
    assert reason in norm["reason"]
    assert line["controls"]["centred"]["rank"] == 1
    assert any(reason in getattr(part, "text", "") for part in controls_section(result).parts)


def test_olmos_norm_has_no_weight(head, write):
    (one,) = found(write("a", head, None, config={"model_type": "olmo", "tie_word_embeddings": False}))
    centred = head - head.mean(axis=1, keepdims=True)
    assert one.controls.final_norm.mean == pytest.approx(inside(centred[T]) / inside(centred[R]), abs=1e-5)
    assert one.controls.tensor is None


def test_an_order_that_a_control_reverses_is_said_and_one_that_it_keeps_is_not(head, gamma, write):
    spread, wide = head.copy(), head.copy()
    centre = head[T].mean(axis=0)
    spread[T] = centre + (head[T] - centre) * 1.5
    kept = screen([write("a", head, gamma), write("b", spread, gamma)], controls=True)
    assert kept.groups[0].control_warnings() == []
    # The vector in common hides the wider digits from G, and only from G.
    wide[T] = spread[T]
    moved = [write("plain", head - head.mean(axis=0), gamma), write("hidden", wide + 9, gamma)]
    result = screen(moved, controls=True)
    assert result.checkpoints[0].repo == moved[0]
    sentences = result.groups[0].control_warnings()
    assert len(sentences) == 2
    assert all("plain over" in text and "hidden" in text for text in sentences)
    assert result.to_dict()["control_warnings"] == sentences


def test_controls_are_there_only_when_asked_for(head, gamma, write):
    result = screen([write("a", head, gamma)])
    content = result.to_dict()
    assert "controls" not in content["checkpoints"][0]
    assert "control_warnings" not in content
    assert controls_section(result) is None


def test_they_cost_at_most_a_megabyte_more(hub, tmp_path):
    d, draw = 3584, np.random.default_rng(0)
    matrix = np.zeros((V, d), dtype=np.float32)
    matrix[[*T, *R, *TOKENS.sample]] = draw.normal(size=(len(T) + len(R) + 256, d))
    tensors = {"lm_head.weight": ("BF16", matrix), "model.norm.weight": ("BF16", np.ones(d))}
    folder = write_checkpoint(tmp_path / "m", tensors)
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    hub.add("org/m", folder)

    async def work():
        async with ours(hub, tmp_path / "cache") as client:
            reader = Reader(client, *SETS, ResolutionCache(client.cache))
            reading = await reader.read(Target("org/m"), Budget(60))
            before = reading.snapshot.meter.bytes_read
            (rows,) = control_rows([(reading.measured(), reading.measured())])
            return await read_controls(reading, rows), reading.snapshot.meter.bytes_read - before

    controls, cost = asyncio.run(work())
    assert controls.sample == 750_000 // (2 * d)
    assert 0.6e6 < cost <= 1e6


# --- what else could rank -------------------------------------------------------------------------------


def test_norm_and_effective_rank_against_the_full_matrix(head, gamma, write):
    folder = write("a-2025-03-02", head, gamma)
    (one,) = found(folder)
    rows = head[list(TOKENS.sample)]
    assert one.controls.row_norm == pytest.approx(np.linalg.norm(rows, axis=1).mean(), rel=1e-6)
    centred = head[T] - head[T].mean(axis=0)
    values = np.linalg.svd(centred / np.linalg.norm(centred, axis=1, keepdims=True))[1] ** 2
    share = values[values > 1e-12] / values.sum()
    assert one.controls.effective_rank == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-5)
    assert one.step_or_date == ("date", 739312.0)
    (line,) = screen([folder], controls=True).to_dict()["checkpoints"]
    assert line["controls"]["date"] == "2025-03-02"
    assert line["controls"]["step"] is None
    assert line["controls"]["random_tokens"]["z"] == one.controls.random_tokens.z


def test_random_sets_have_the_mean_and_spread_of_all_sets_and_g_is_placed_among_them():
    draw = np.random.default_rng(6)
    others, reference = draw.normal(size=(40, D)) + 0.5, draw.normal(size=(30, D))
    domain = others[:5] + draw.normal(size=(5, D))
    null = random_tokens(domain, reference, others)
    assert isinstance(null, RandomTokens)
    sets = [others[draw.choice(40, 5, replace=False)] for _ in range(2000)]
    gaps = np.array([gap(rows, reference, "cosine").mean for rows in sets])
    assert null.mean == pytest.approx(gaps.mean(), abs=4 * gaps.std() / np.sqrt(200))
    assert null.sd == pytest.approx(gaps.std() / np.sqrt(1 - 5 / 40), rel=0.2)
    own = gap(domain, reference, "cosine").mean
    assert null.z == pytest.approx((own - null.mean) / null.sd, abs=1e-9)
    assert null.rows == 40
    padded = random_tokens(domain, reference, np.vstack([others, np.zeros((9, D))]))
    assert padded == null


def test_too_few_random_tokens_are_said():
    rows = np.random.default_rng(7).normal(size=(12, D))
    assert random_tokens(rows[:7], rows, rows) == (
        "there are 12 random tokens of its range of ids within 1 MB, expected 14"
    )


def test_random_tokens_lie_in_the_range_of_ids_which_widens_where_it_is_narrow():
    domain, taken = list(range(100, 110)), [*range(100, 110), 112]
    near, others = random_ids(domain, taken, [5, 104, 111, 112, 300], 400, 15)
    assert near == [111]  # of the sample: in the widened range, and neither of T nor of R
    assert len(others) == 15
    assert all(60 <= i <= 149 for i in others)
    assert not set(others) & {*taken, *near}
    assert random_ids(domain, taken, [5, 300], 400, 15) == ([], random_ids(domain, taken, [300], 400, 15)[1])
    # A wide range takes the sample's rows, and reads no more than it is allowed.
    near, others = random_ids([0, 399], [0, 399], [5, 104, 111], 400, 2)
    assert near == [5, 104, 111]
    assert len(others) == 2
    assert random_ids([0, 1, 2], [0, 1, 2], [], 5, 9) == ([], [3, 4])  # the whole vocabulary is that small
