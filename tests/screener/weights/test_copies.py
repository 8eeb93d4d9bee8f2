"""Copies are recognised in every format and after every change that moves no prediction; siblings are not."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
import test_figures as planted
from lmeval_screener import screen
from lmeval_screener.targets.names import Target
from lmeval_screener.weights.copies import originals, sketch
from lmeval_screener.weights.projection import FinalNorm
from screenings import ranked, screened
from screenings import result as result_of
from test_figures import GAMMA, HEAD, OF_NORM, SAME, D, R, T

from lmeval_dispersion.installation import data_folder

DEMO = data_folder("demo")
ROWS = [*T, *R]
SIBLINGS = ["sums-00", "sums-20", "sums-80", "wrong-sums-45"]


def stored(values, dtype):
    if dtype == "F16":
        return values.astype("<f2").astype("<f4")
    return planted.rounded(values, dtype).astype("<f4")


def reading(name, head, gamma, dtype="F32", kind="rms"):
    norm = FinalNorm("norm", stored(gamma, dtype).astype(float), kind)
    return screened(name, dtype=dtype, sketch=sketch(stored(head, dtype)[ROWS], norm, dtype))


def by_rows(*members):
    return [original[:2] for original in originals(members)]


def places(*members):
    return [original.place for original in originals(members)]


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("safetensors", "F32"), ("safetensors", "BF16"), ("bin", "F16")),
        *(("gguf", "F16"), ("gguf", "Q8_0"), ("gguf", "Q4_0")),
    ],
)
def test_every_format_and_change_that_moves_no_prediction(tmp_path, kind, dtype, norm):
    copies = {"converted": (HEAD, GAMMA), **SAME, norm: OF_NORM[norm]}
    exact = "gguf" if kind == "gguf" else "safetensors", "F32", norm
    first = planted.write(tmp_path / "first", *exact, HEAD, GAMMA)
    other = planted.write(tmp_path / "other", *exact, HEAD[:, ::-1] ** 3, GAMMA)
    names = [
        planted.write(tmp_path / name, kind, dtype, norm, *copy) for name, copy in copies.items()
    ]
    result = screen([first, other, *names])
    (group,) = result.groups
    stands = {c.label.partition("/")[0]: c for c in group.checkpoints}
    label = stands["first"].label
    # A body in GGUF is not compared.
    of = "equal_rows_with" if kind == "gguf" else "copy_of"
    assert {name for name, c in stands.items() if getattr(c, of) == label} == set(copies)
    assert {stands[name].rank for name in (*copies, "first")} != {stands["other"].rank}
    assert len({stands[name].rank for name in (*copies, "first")}) == 1
    if dtype == "F32":
        # G would order them: the vector moves the cosine by far more than its error.
        members = [stands[name] for name in ("first", *copies)]
        assert len({round(c.gaps["cosine"].mean, 4) for c in members}) > 1
        seen = HEAD * GAMMA
        seen = seen - seen.mean(axis=1, keepdims=True) if norm == "layer" else seen
        slow = planted.mean_distance(seen[T]) / planted.mean_distance(seen[R])
        for c in members:
            assert c.ratio.mean == pytest.approx(slow, rel=1e-5)
            assert c.ratio.rounding < 1e-4 * slow
    text = " ".join(result.to_markdown().split())
    assert (
        f" of {label} (other weights not compared)" if kind == "gguf" else f" of {label}"
    ) in text
    entries = {c["label"]: c[of] for c in result.to_dict()["checkpoints"]}
    assert entries[label] is None
    assert entries[stands["converted"].label] == label


def test_a_conversion_is_the_same_number_for_number_and_the_coarser_one_is_the_copy():
    types = ("BF16", "F16", "F32")
    for a, b in combinations(types, 2):
        assert by_rows(reading("b", HEAD, GAMMA, b), reading("a", HEAD, GAMMA, a)) == (
            # A half float is no rounded BF16 of numbers that neither of them holds.
            [(0, True), (1, True)] if (a, b) == ("BF16", "F16") else [(0, True), (0, True)]
        )
    half = stored(HEAD, "BF16"), stored(GAMMA, "BF16")
    assert places(reading("a", *half, "BF16"), reading("b", *half, "F16"), reading("c", *half)) == [
        2,
        2,
        2,
    ]


@pytest.mark.parametrize("share", [1e-7, 1e-5, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_noise_makes_a_sibling_unless_every_stored_number_is_the_same(dtype, share):
    draw = np.random.default_rng(3)
    noisy = HEAD * (1 + share * draw.normal(size=HEAD.shape))
    equal = (stored(noisy, dtype)[ROWS] == stored(HEAD, dtype)[ROWS]).all()
    assert (
        places(reading("a", HEAD, GAMMA, dtype), reading("b", noisy, GAMMA, dtype)) == [0, 0]
    ) == equal
    # Converted ones: the other's numbers, rounded, are not these.
    rounds = (stored(noisy, "BF16")[ROWS] == stored(HEAD, "BF16")[ROWS]).all()
    assert (
        places(reading("a", HEAD, GAMMA), reading("b", noisy, GAMMA, "BF16")) == [0, 0]
    ) == rounds
    # A norm alone that was trained.
    assert places(reading("a", HEAD, GAMMA), reading("b", HEAD, GAMMA * (1 + share))) == [0, 1]


def test_one_step_of_training_makes_no_copy_at_any_rate_that_moves_a_stored_number():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    found = {True: 0, False: 0}
    for name in SIBLINGS:
        ids = torch.tensor([[3, 9, 4, 17, 200, 31], [5, 6, 700, 8, 12, 40]])
        for rate in (1e-7, 1e-5, 1e-4, 1e-3):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                DEMO / name, dtype=torch.float32
            )
            parts = model.lm_head.weight, model.model.norm.weight
            # Away from the numbers of BF16: a float32 master.
            with torch.no_grad():
                parts[0].mul_(
                    1 + 1e-3 * torch.sin(torch.arange(parts[0].numel())).view_as(parts[0])
                )
            before = [part.detach().double().numpy().copy() for part in parts]
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            after = [part.detach().double().numpy() for part in parts]
            for dtype in ("F32", "F16", "BF16"):
                pair = [reading("a", *before, dtype), reading("b", *after, dtype)]
                same = all(
                    (stored(a, dtype)[rows] == stored(b, dtype)[rows]).all()
                    for a, b, rows in zip(before, after, (ROWS, slice(None)), strict=True)
                )
                found[same] += 1
                assert (places(*pair) == [0, 0]) == same, (name, rate, dtype)
    assert found[False] > 40


def test_of_two_siblings_the_quantised_one_is_a_copy_of_neither_where_rounding_hides_which():
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q4_0
    noisy = HEAD * (1 + 1e-3 * np.random.default_rng(3).normal(size=HEAD.shape))
    far = HEAD * (1 + 0.5 * np.random.default_rng(4).normal(size=HEAD.shape))
    blocks = gguf.dequantize(gguf.quantize(HEAD.astype("<f4"), kind), kind)[ROWS]
    quantised = screened(
        "q",
        dtype="Q4_0",
        sketch=sketch(blocks, FinalNorm("norm", GAMMA.astype("<f4").astype(float), "rms"), "Q4_0"),
    )
    first, second, third = (
        reading(n, head, GAMMA) for n, head in zip("abc", (HEAD, noisy, far), strict=True)
    )
    assert by_rows(first, third, quantised) == [(0, True), (1, True), (0, False)]
    assert by_rows(quantised, third) == [(0, True), (1, True)]
    assert places(first, second, quantised) == [0, 1, 2]


@pytest.mark.parametrize("share", [1e-3, 2e-3])
def test_a_conversion_between_two_siblings_makes_neither_a_copy(share):
    """Rounding hides whose conversion it is, and the siblings' own numbers show that they differ."""
    draw, head = np.random.default_rng(3), stored(HEAD, "BF16")
    scale = np.exp(0.5 * draw.normal(size=D))
    first, folded = (
        reading("o", head, GAMMA, "BF16"),
        reading("f", head * scale, GAMMA / scale, "BF16"),
    )
    second = reading("s", head * (1 + share * draw.normal(size=head.shape)), GAMMA, "BF16")
    assert places(first, second) == [0, 1]
    assert places(first, folded) == [0, 0]
    for members in permutations([first, folded, second]):
        assert places(*members) == [0, 1, 2]


def test_the_demos_models_are_no_copies():
    result = screen(demo=True)
    assert {c.copy_of for c in result.checkpoints} == {None}
    assert (
        "cop"
        not in " ".join(result.answer())
        + result.to_markdown().partition("\n> ")[2].lower().partition("##")[0]
    )


def test_copies_take_no_place_of_an_answer_or_a_short_list():
    members = ranked([screened(name, rank) for rank, name in enumerate("abcde", 1)])
    twins = [
        replace(members[0], target=Target(name), repo=name, copy_of="a") for name in ("a2", "a3")
    ]
    result = result_of([members[0], *twins, *members[1:]])
    assert [c.label for c in result.shortlist(2).chosen] == ["a", "b"]
    assert "a2" not in " ".join(result.answer())
    assert "a2 and a3 are copies of a." in " ".join(result.to_markdown().split())


def test_ten_thousand_take_seconds():
    draw, (n, count) = np.random.default_rng(5), (len(ROWS), 10_000)
    # A tenth are copies of one, a tenth quantised; siblings lie as near to one another as fine-tunes do.
    some = [HEAD[ROWS] * (1 + 0.05 * draw.normal(size=(n, D))) for _ in range(100)]
    norm = FinalNorm("norm", GAMMA, "rms")
    kept = [sketch(rows, norm, "BF16") for rows in some]
    members = [screened("x", dtype="BF16", sketch=kept[0]) for _ in range(count)]
    for at in range(0, count, 10):
        members[at] = replace(members[at], dtype="Q8_0")
    for at, member in enumerate(members):
        if at % 10 != 1:
            numbers = np.frombuffer(kept[at % 100][48:], "<f4") * (1 + 0.01 * draw.normal())
            marks = at.to_bytes(8, "little") * 6
            members[at] = replace(member, sketch=marks + numbers.astype("<f4").tobytes())
    begin = time.process_time()
    found = places(*members)
    assert time.process_time() - begin < 5
    assert {found[at] for at in range(1, count, 10)} == {1}
    assert sum(place != at for at, place in enumerate(found)) < count / 10 + 100
