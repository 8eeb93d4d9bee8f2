"""A ratio over what answers are made of, the base as zero point, and which figure ranks."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from checkpoints import write_checkpoint, write_safetensors
from lmeval_screener import screen
from lmeval_screener.chance import is_noise
from lmeval_screener.cli import main
from lmeval_screener.errors import ScreeningError
from lmeval_screener.figures import difference, figures_of, gaps, numbers_of, ratio
from lmeval_screener.orders import Order
from lmeval_screener.ranking import against_base, ranked
from lmeval_screener.registry import queries
from lmeval_screener.registry.database import to_read
from lmeval_screener.result.gate import Gate
from lmeval_screener.screened import Screened
from lmeval_screener.tokens.resolution import load_domain, resolve_tokens
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from lmeval_screener.weights.projection import FinalNorm
from scipy.spatial.distance import pdist
from scipy.stats import binom
from screenings import result as result_of
from screenings import screened
from test_figures import rounded
from token_cases import REFERENCE, tokenizer_json

from lmeval_dispersion.cli import main as dispersion
from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.installation import data_folder

WIDTH, DIGITS, EVERYDAY = 576, 10, 80  # SmolLM2-135M's width
SET = """
schema: 1
name: snippets
role: answers
tasks: [snippets, snippets_*]
domain: math
answers: {}
"""
WORDS = [
    t
    for words in (load_token_set("math"), REFERENCE)
    for g in words.groups.values()
    for t in g.texts()
]
ANSWERS = {" num": 40, " buf": 30, " True": 20, " None": 10, WORDS[-1]: 50, " rare": 1}
PIECES = [*WORDS, *(text for text in ANSWERS if text not in WORDS)]
TOKENIZER = tokenizer_json({text.replace(" ", "Ġ"): 2 * i for i, text in enumerate(PIECES)})
ROW = {text: 2 * i for i, text in enumerate(PIECES)}


def head(seed=0, d=24):
    return np.random.default_rng(seed).normal(size=(2 * len(PIECES), d)).astype("f4")


def write(folder, rows, dtype="F32"):
    tensors = {
        "lm_head.weight": (dtype, rows),
        "model.layers.0.self_attn.q_proj.weight": ("F32", np.ones((4, 4))),
        "model.norm.weight": ("F32", np.ones(rows.shape[1])),
    }
    return str(write_checkpoint(folder, tensors, tokenizer=TOKENIZER))


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "snippets.yaml"
    path.write_text(SET.format(json.dumps(ANSWERS)))
    return str(path)


# --- whose ratio is over what ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domain", "task", "own", "title"),
    [
        (None, None, False, "math"),
        ("math", None, False, "math"),
        ("legal", None, False, "legal"),
        ("code:builtins", None, False, "code:builtins"),
        ("code", None, True, "code"),
        (None, "humaneval", True, "humaneval"),
        (None, "gsm8k", True, "gsm8k"),
        ("math", "mmlu", True, "mmlu"),
    ],
)
def test_where_no_answers_are_known_the_ratio_is_over_t_as_before(domain, task, own, title):
    found = load_domain(domain, task)
    plain = load_token_set(domain or {"humaneval": "code"}.get(task, "math"))
    assert (found.name, found.groups, found.title) == (plain.name, plain.groups, title)
    assert (found.digest != plain.digest) == (found.answers is not None) == own


def test_of_several_tasks_the_first_with_known_answers_counts_and_all_are_evaluated(
    tmp_path, task, capsys
):
    found = load_domain(None, f"hellaswag, mine,{task},gsm8k")
    assert (found.answers.name, found.task, found.name) == ("snippets", "snippets", "math")
    assert found.tasks == ("hellaswag", "mine", "snippets", "gsm8k")
    assert found.remark.startswith(
        "the ratio uses the tokens of snippets, since hellaswag has no answer tokens"
    )
    assert load_domain("code", "mine").answers.name == "humaneval"
    assert load_domain("code", "mine").tasks == ("mine",)
    assert (
        "the tokens of legal, since the task 'mine' has no bundled"
        in load_domain("legal", "mine").remark
    )
    assert load_domain(None, "gsm8k,mine").remark == load_domain("math").remark == ""
    with pytest.raises(
        UsageError, match=r"the task 'mine' has no bundled answer tokens.* or name a "
    ):
        load_domain(None, "mine,hellaswag")
    names, folder = (
        [write(tmp_path / f"m{seed}", head(seed)) for seed in range(3)],
        tmp_path / "list",
    )
    assert main([*names, "--tasks", f"mine,{task}", "--shortlist", "1", "--emit", str(folder)]) == 0
    assert json.loads((folder / "manifest.json").read_text())["tasks"] == ["mine", "snippets"]
    assert "the ratio uses the tokens of snippets, since the task 'mine'" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="the tokens of snippets"):
        assert screen(names, tasks=f"mine,{task}").task == "snippets"


def test_a_report_warns_where_most_of_the_answers_is_left_out(tmp_path, capsys):
    names = [write(tmp_path / f"m{seed}", head(seed)) for seed in range(3)]
    note = "the ratio leaves out 75% of the tokens in the answers of snippets"
    path = tmp_path / "snippets.yaml"
    for form, warned in ((" 0 1 2{}", True), ("{}", False)):
        content = {form.format(text): 10 for text in (" num", " buf", " True", " None")}
        path.write_text(SET.format(json.dumps(content)))
        assert main([*names, "--task", str(path)]) == 0
        assert (note in " ".join(capsys.readouterr().out.split())) == warned


def test_rows_of_a_task_are_the_tokenizers_own_and_none_is_an_everyday_word():
    tokenizers = pytest.importorskip("tokenizers")
    content = (data_folder("demo") / "sums-00" / "tokenizer.json").read_bytes()
    tokenizer, words = (
        tokenizers.Tokenizer.from_str(content.decode()),
        Vocabulary.from_tokenizer_json(content),
    )
    for task in ("gsm8k", "mmlu"):
        found = resolve_tokens(load_domain(tasks=task), REFERENCE, words)
        assert len(found.of_ratio) >= 3
        for token in found.of_ratio:
            assert tokenizer.id_to_token(token.id) == token.piece
            assert token.id in tokenizer.encode(token.text, add_special_tokens=False).ids
        assert not {token.id for token in found.of_ratio} & set(found.reference_ids)


def test_the_ratio_is_over_the_answers_and_g_over_its_t(tmp_path, task, capsys):
    names = [write(tmp_path / f"m{seed}", head(seed)) for seed in range(3)]
    plain = screen(names)
    found = screen(names, tasks=task, registry=tmp_path / "r.db")
    of = {c.label: c for c in plain.checkpoints}
    rows, everyday = (
        [ROW[text] for text in (" num", " buf", " True", " None")],
        found.best.resolution.reference_ids,
    )
    for c in found.checkpoints:
        seen = head(int(c.label[-1])).astype(float)
        assert [
            token.id for token in c.resolution.of_ratio
        ] == rows  # by count, nothing rare, no everyday word
        slow = pdist(seen[rows]).mean() / pdist(seen[everyday]).mean()
        assert c.ratio.mean == pytest.approx(slow, rel=1e-6)
        assert c.ratio.mean != pytest.approx(of[c.label].ratio.mean, rel=1e-3)
        assert c.gaps["cosine"].mean == of[c.label].gaps["cosine"].mean
        with pytest.raises(GeometryError, match="same tokens"):
            difference(c.ratio, of[c.label].ratio)
    content = found.to_dict()
    assert (content["domain"], content["task"]) == ("math", "snippets")
    assert content["answers"] == {"name": "snippets", "tokens": {found.best.family: 4}}
    assert list(content["tokens"][0]["answers"]["pieces"].values()) == rows
    assert plain.to_dict()["answers"] is None
    assert (
        "spread of 4 answer tokens of snippets divided by that of everyday words"
        in found.to_markdown()
    )
    assert "answer tokens of snippets" not in plain.to_markdown()
    # From the registry the same, over the same tokens; without the task other figures, that are read.
    again = screen(names, tasks=task, registry=tmp_path / "r.db")
    assert [c.bytes_read for c in again.checkpoints] == [0] * 3
    for a, b in zip(found.checkpoints, again.checkpoints, strict=True):
        np.testing.assert_array_equal(numbers_of(a.gaps, a.ratio), numbers_of(b.gaps, b.ratio))
    assert screen(names, registry=tmp_path / "r.db").best.ratio.mean == plain.best.ratio.mean
    # The short list is evaluated on the task; a bundled task is evaluated by the name that was given.
    assert (
        main([*names, "--task", task, "--shortlist", "1", "--emit", str(tmp_path / "list"), "-q"])
        == 0
    )
    assert json.loads((tmp_path / "list" / "manifest.json").read_text())["tasks"] == ["snippets"]
    assert main([*names, "--task", "humanevl"]) == 2
    assert "humaneval" in capsys.readouterr().err


def test_a_domain_whose_answers_a_vocabulary_lacks_has_its_ratio_over_t_and_a_task_is_refused():
    code = [t for g in load_token_set("code").groups.values() for t in g.texts()]
    code = [t for t in code if t.strip() not in ("True", "False", "None", "is", "in", "not")]
    pieces = [*code, *WORDS[10:]]  # no digit
    content = tokenizer_json({t.replace(" ", "Ġ"): i for i, t in enumerate(pieces)})
    words = Vocabulary.from_tokenizer_json(content)
    found = resolve_tokens(load_domain("code"), REFERENCE, words)
    assert (found.answers, found.of_ratio) == ((), found.domain)
    with pytest.raises(ScreeningError, match="humaneval"):
        resolve_tokens(load_domain("code", "humaneval"), REFERENCE, words)


def test_packed_figures_keep_another_number_of_tokens_for_the_ratio():
    draw = np.random.default_rng(3)
    domain, reference, answers = (draw.normal(size=(n, 16)).astype("f4") for n in (10, 40, 4))
    both = gaps(domain, reference), ratio(answers, reference, norm(16), "BF16")
    packed = numbers_of(*both)
    again, back = figures_of(packed, 10, 40, 4)
    np.testing.assert_array_equal(numbers_of(again, back), packed)
    assert (back.marks == both[1].marks).all()
    assert figures_of(numbers_of(both[0], None), 10, 40, 4)[1] is None
    # What an earlier version wrote ends before the marks.
    old = figures_of(packed[: -3 - len(back.marks)], 10, 40, 4)[1]
    assert (old.mean, old.marks.size) == (back.mean, 0)
    assert old.rounding_from(back) == old.rounding + back.rounding


# --- the base as zero point -----------------------------------------------------------------------------


def norm(width):
    return FinalNorm("n", np.ones(width), "rms")


class Tuned:
    """A released model's head in BF16 whose ratio is near 0.52, and fine-tunes that move by a thousandth."""

    def __init__(self, seed):
        self.draw = np.random.default_rng(seed)
        rows = 0.1 * self.draw.normal(size=(DIGITS + EVERYDAY, WIDTH)) + 0.02 * self.draw.normal(
            size=WIDTH
        )
        rows[:DIGITS] = rows[:DIGITS].mean(axis=0) + 0.52 * (
            rows[:DIGITS] - rows[:DIGITS].mean(axis=0)
        )
        self.rows = rounded(rows)

    def figures(self, spread=1.0, noise=0.001):
        rows = self.rows.astype(float)
        centre = rows[:DIGITS].mean(axis=0)
        rows[:DIGITS] = centre + spread * (rows[:DIGITS] - centre)
        rows = rounded(rows + noise * 0.1 * self.draw.normal(size=rows.shape))
        split = rows[:DIGITS], rows[DIGITS:]
        return gaps(*split), ratio(*split, norm(WIDTH), "BF16")


def test_a_released_models_fine_tunes_are_told_from_their_base_though_their_rows_move_by_a_thousandth():
    """The pilot: 0.52247, right sums 0.52317, wrong sums 0.52232, of which BF16 moves 2e-5."""
    counts = dict.fromkeys(("right", "wrong", "unpractised"), 0)
    for seed in range(20):
        model = Tuned(seed)
        base = model.figures(noise=0)[1]
        found = {
            "right": model.figures(1.0023)[1],
            "wrong": model.figures(0.9994)[1],
            "unpractised": model.figures()[1],
            "head left alone": model.figures(noise=0)[1],
        }
        against = against_base(base, found)
        assert 4e-4 < against["right"].difference < 1.2e-3
        assert -2.5e-4 < against["wrong"].difference < -1e-4
        counts["right"] += against["right"].side == "above"
        counts["wrong"] += against["wrong"].side == "below"
        counts["unpractised"] += against["unpractised"].side == "level"
        assert against["head left alone"].side == "equal"
        # The bound for unrelated rounding sees none of the second.
        assert not base.above(found["wrong"])
        # So is a copy in another type, however it is rounded.
        assert against_base(base, {"x": found["wrong"]}, {"x"})["x"].side == "equal"
    assert counts == dict.fromkeys(counts, 20)


def test_rounding_from_a_base_is_as_large_as_what_storing_moves():
    model, moved, bounds = Tuned(1), [], []
    base = model.figures(noise=0)[1]
    for _ in range(60):
        rows = model.rows + 0.0004 * model.draw.normal(
            size=model.rows.shape
        )  # far more than BF16's steps
        exact, stored = (
            ratio(part[:DIGITS], part[DIGITS:], norm(WIDTH), dtype)
            for part, dtype in ((rows, "F32"), (rounded(rows), "BF16"))
        )
        moved.append(abs(stored.mean - exact.mean))
        bounds.append(stored.rounding_from(base))
    assert max(moved) < min(bounds) < 6 * np.sqrt(np.mean(np.square(moved)))
    assert base.rounding_from(base) == 0


@pytest.mark.parametrize("groups", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_on_noise_at_most_one_group_in_twenty_has_a_side_or_an_order(groups):
    sided = ordered = 0
    for seed in range(groups):
        model = Tuned(seed)
        base = model.figures(noise=0)[1]
        ratios = [model.figures(noise=0.01)[1] for _ in range(6)]
        # Noise adds to every distance; against the mean of its kind it has no side.
        names = ("mean", "left_out_domain", "left_out_reference")
        of_noise = replace(
            base, **{n: np.mean([getattr(r, n) for r in ratios], axis=0) for n in names}
        )
        sided += any(
            a.side != "level" for a in against_base(of_noise, dict(enumerate(ratios))).values()
        )
        ordered += not is_noise(ratios)
    assert max(sided, ordered) <= binom.isf(0.01, groups, 0.05)


# --- said -----------------------------------------------------------------------------------------------


def group(rank_by="gap", **spreads):
    """Planted fine-tunes of a base, ranked; a spread of None leaves the head alone."""
    model, readings = Tuned(5), []
    for name, spread in {"zero": None, **spreads}.items():
        g, r = model.figures(spread or 1.0, noise=0.0 if spread is None else 0.001)
        readings.append(screened(name, gaps=g, ratio=r, commit=None))
    members = ranked(readings, Order(rank_by), [readings[0].label])
    assert all(isinstance(c, Screened) for c in members)
    return result_of(members, base="zero", ranked_by=rank_by)


LEARNED = "Above the base zero by the ratio: "
FORGOT = "Below the base zero by the ratio: "
EQUAL = "b has the output rows of its base (zero)."


@pytest.mark.parametrize(
    ("spreads", "said", "not_said"),
    [
        (
            {"a": 1.1, "b": 1.05},
            [LEARNED + "a and b."],
            ["Below", "output rows", "does not separate"],
        ),
        (
            {"a": 0.95, "b": 0.9},
            [FORGOT + "a and b."],
            ["Above", "output rows", "does not separate"],
        ),
        (
            {"a": 1.0, "b": None},
            [EQUAL, "The ratio does not separate a from the base zero."],
            ["Above", "Below"],
        ),
        ({"a": 1.2}, [LEARNED + "a."], ["was screened", "Evaluate first", "Below"]),
        (
            {},
            ["No other checkpoint has the tokenizer and scale of the base zero."],
            ["Above", "Only"],
        ),
    ],
)
def test_on_which_side_of_the_base_each_lies_is_said_and_nothing_else(spreads, said, not_said):
    lines = group(**spreads).answer()
    text = " ".join(lines)
    assert all(sentence in lines for sentence in said), lines
    assert not any(words in text for words in not_said), lines


@pytest.mark.parametrize(
    ("rank_by", "words"),
    [
        ("gap", "a, b, c (all 3, highest G first; math)"),
        ("ratio", "a, b (highest ratio of 3; math)"),
    ],
)
def test_the_base_stands_in_the_table_and_is_never_chosen(rank_by, words):
    found = group(rank_by, a=1.2, b=0.9, c=0.8)
    assert found.checkpoints[1].is_base
    assert found.best.label == "a"
    assert "zero (base)" in found.to_markdown()
    assert found.answer()[0] == f"Evaluate first: {words}."
    chosen = found.shortlist(2)
    assert [c.label for c in chosen.chosen] == ["a", "b"]
    assert found.shown(chosen).groups[0].base is not None
    content = found.to_dict()
    assert (content["base"], content["ranked_by"]) == ("zero", rank_by)
    sides = {
        c["label"]: c["against_base"] and c["against_base"]["side"] for c in content["checkpoints"]
    }
    assert sides == {"zero": None, "a": "above", **dict.fromkeys("bc", "below")}
    # Without a base nothing changes.
    plain = replace(
        found, checkpoints=tuple(replace(c, is_base=False, against=None) for c in found.checkpoints)
    )
    assert "Against the base" not in plain.to_markdown()
    assert "is_base" not in plain.to_dict()["checkpoints"][0]


def test_a_gate_is_for_candidates_and_the_help_says_what_ranks(tmp_path, capsys):
    found = group(a=1.2, b=1.1)
    gate = Gate.of(found.groups, [], "b")
    assert (gate.below, gate.compared, gate.not_compared) == ((), 1, 0)
    assert Gate.of(found.groups, [], "zero").compared == 2
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "figure that ranks checkpoints: the ratio, or the gap G (default: " in shown


def test_a_registry_answers_with_the_tokens_that_a_domain_has_now(tmp_path, task):
    names = [write(tmp_path / f"m{seed}", head(seed)) for seed in range(3)]
    for of, count in ((None, 3), (task, 2)):  # as if the set of a domain had changed
        screen(names[:count], tasks=of, registry=tmp_path / "r.db")
    with closing(sqlite3.connect(tmp_path / "r.db")) as file, file:
        file.execute("UPDATE runs SET domain = 'math'")
    with to_read(tmp_path / "r.db") as connection:
        found = [queries.query(connection, Order(), None, d).rows() for d in (None, "math")]
    assert [len(rows) for rows in found] == [2, 2]


def test_a_registry_ranks_by_what_it_is_asked_for(tmp_path, capsys):
    names = [write(tmp_path / f"m{seed}", head(seed)) for seed in range(5)]
    orders = set()
    for by in ("gap", "ratio"):
        order = tuple(
            c.label for c in screen(names, registry=tmp_path / "r.db", rank_by=by).checkpoints
        )
        assert (
            dispersion(
                ["registry", "query", str(tmp_path / "r.db"), "--rank-by", by, "--format", "csv"]
            )
            == 0
        )
        lines = capsys.readouterr().out.splitlines()[1:]
        orders.add(order)
        assert order == tuple(line.partition(",")[0] for line in lines)
    assert len(orders) > 1


def adapter(folder, base):
    """A LoRA that leaves the head alone."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(
        json.dumps({**settings, "base_model_name_or_path": base})
    )
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    write_safetensors(folder / "adapter_model.safetensors", {name: ("F32", np.ones((1, 4)))})
    return str(folder)


def test_the_base_that_all_adapters_name_is_the_zero_point(tmp_path, capsys):
    base, other = write(tmp_path / "base", head(0)), write(tmp_path / "other", head(1))
    a, b, run = (adapter(tmp_path / name, base) for name in ("a", "b", "run"))
    write(tmp_path / "run" / "merged", head(1))
    equal = "has the output rows of its base (base)"  # the other is its copy
    for names, said in (
        ([a, b], True),
        ([a, b, base], True),  # it is there already
        ([a, b, other], False),  # names none, and is of no run of theirs
        ([a, run], True),  # merged, in the folder of one of them, names none
        ([a], False),
        ([a, base], False),  # one alone
    ):
        assert main([*names, "--registry", str(tmp_path / f"{len(names)}.db")]) == 0, names
        out = " ".join(capsys.readouterr().out.split())
        assert equal in out, out
        assert (
            "base: taken as the base, because the other checkpoints name it as their base" in out
        ) is said, out
    # What is named on the command line counts.
    assert main([a, b, "--base", other, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["base"] == "other"


def test_the_verdict_says_the_task_what_ranked_and_the_base(tmp_path, task, capsys):
    names = [write(tmp_path / f"m{seed}", head(seed)) for seed in range(4)]
    folder = str(tmp_path / "list")
    options = [
        "--task",
        task,
        "--base",
        "m0",
        "--rank-by",
        "G",
        "--shortlist",
        "2",
        "--emit",
        folder,
    ]
    assert main([*names, *options]) == 0
    (tmp_path / "a.csv").write_text(
        "repo,accuracy\n" + "".join(f"{n},0.{n[-1]}\n" for n in names[1:])
    )
    manifest = tmp_path / "list" / "manifest.json"
    content = json.loads(manifest.read_text())
    assert [content[key] for key in ("task", "ranked_by", "base")] == ["snippets", "gap", "m0"]
    title = "Verdict on a short list for {} (highest G, base m0)"
    for missing, said in (
        ((), title.format("snippets")),
        (("task",), title.format("math")),
        (("base", "ranked_by"), "Verdict on a short list for math"),
    ):
        for key in missing:
            del content[key]
        manifest.write_text(json.dumps(content))  # as earlier versions wrote it
        capsys.readouterr()
        assert main(["verify", folder, str(tmp_path / "a.csv"), "--format", "markdown"]) == 0
        assert capsys.readouterr().out.splitlines()[0] == f"## {said}"


def test_a_base_that_is_elsewhere_is_said(tmp_path, capsys):
    names = [write(tmp_path / f"m{seed}", head(seed)) for seed in range(3)]
    other = tmp_path / "other"
    write_checkpoint(other, {"lm_head.weight": ("F32", head(1))})
    assert main([*names, "--base", str(other)]) == 3
    assert "Not compared with the base other (TokenizerNotFound)" in capsys.readouterr().out
    # The base is the original of what has its rows, wherever it is named.
    same = write(tmp_path / "a-lora", head(0))
    assert main([same, *names, "--base", "m0", "--rank-by", "ratio"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "a-lora is a copy of m0" in out
