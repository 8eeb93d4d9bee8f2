"""Short lists: who is on them, how probable that was, and what is written for lm-eval."""

from __future__ import annotations

import json
import math
import subprocess
from collections import Counter
from dataclasses import replace

import pytest
import yaml
from lmeval_screener.shortlist.manifest import check_emit, emit, read_shortlist_manifest
from lmeval_screener.targets.names import Target
from lmeval_screener.tokens.resolution import load_domain
from screenings import COMMIT, failed, result, screened, siblings

from lmeval_dispersion.errors import UsageError

MATH = load_domain("math")
MINE = replace(MATH, name="mine", tasks=())


def result_of(*members):
    return result(members, [failed("org/none")])


def group(count, scale="7B"):
    ranks = range(1, count + 1)
    return [screened(f"org/{scale}-{rank}", rank, scale=scale) for rank in ranks]


def names(checkpoints):
    return [c.repo.rpartition("-")[2] for c in checkpoints]


@pytest.mark.parametrize(
    ("k", "listed", "sentence"),
    [
        (3, "123", "3 of 9: ranks 1–3"),
        (1, "1", "1 of 9: rank 1"),
        (20, "123456789", "all 9"),
        (None, "123456789", "all 9"),  # by G no chance is known
    ],
)
def test_a_list_takes_the_first_places(k, listed, sentence):
    (choice,) = result_of(*group(9)).shortlist(k).groups
    assert names(choice.listed) == list(listed)
    assert choice.sentence() == sentence
    assert {c.chosen for c in choice.listed} == {"rank"}


def test_without_a_number_a_list_holds_the_best_with_nine_in_ten():
    found = result_of(*siblings(*(2 - i / 20 for i in range(24))))
    (choice,) = found.shortlist().groups
    assert (choice.sentence(), choice.kind) == ("9 of 24: ranks 1–9", "fine-tunes")
    assert found.shortlist().k == found.first_for() == 9
    # Of equals all are listed; copies are evaluated with their original.
    equal = siblings(*(2 - i // 3 / 20 for i in range(24)))
    (choice,) = result_of(*equal).shortlist(2).groups
    assert choice.sentence() == "6 of 24: ranks 1–2"
    copies = [replace(c, copy_of="a") if c.label in "bc" else c for c in equal]
    (choice,) = result_of(*copies).shortlist(2).groups
    assert [c.label for c in choice.listed] == list("adef")
    assert result_of(*copies).shortlist(8).groups[0].sentence() == "22 of 24, all except copies"
    # Rows say nothing of those with their base's: they are listed beyond the number.
    base = replace(equal[0], is_base=True, same_rows=0, target=Target("z"), repo="z")
    of_base = [replace(c, equal_rows_with="z", same_rows=0) for c in equal[:3]]
    found = result_of(base, *of_base, *(replace(c, rank=c.rank - 1) for c in equal[3:]))
    (choice,) = found.shortlist().groups
    assert [c.label for c in choice.listed][:6] == list("abcdef")
    (choice,) = found.shortlist(1).groups
    assert [c.label for c in choice.listed] == list("abcdef")
    assert choice.sentence() == "6 of 24: rank 1, and 3 with the rows of the base"


def test_every_other_is_drawn_with_the_probability_that_is_recorded():
    result = result_of(*group(8))
    counts = Counter()
    for seed in range(1500):
        (choice,) = result.shortlist(3, audit_sample=2, seed=seed).groups
        counts.update(names(choice.audit))
        assert len(set(names(choice.chosen))) == 5
    assert [c.inclusion_probability for c in choice.group.checkpoints] == [1, 1, 1] + [2 / 5] * 5
    # Binomial: 600 expected of 1,500, standard deviation 19.
    assert sorted(counts) == ["4", "5", "6", "7", "8"]
    assert all(abs(count - 600) < 90 for count in counts.values())


def test_the_sample_of_a_group_does_not_depend_on_the_other_groups_nor_on_the_order():
    alone = result_of(*group(20)).shortlist(2, audit_sample=4, seed=3).groups[0]
    both = result_of(*group(30, "1B"), *group(20)).shortlist(2, audit_sample=4, seed=3).groups[1]
    assert names(alone.audit) == names(both.audit)
    best, others = group(20)[:2], [replace(c, rank=23 - c.rank) for c in reversed(group(20)[2:])]
    turned = result_of(*best, *others).shortlist(2, audit_sample=4, seed=3).groups[0]
    assert set(names(alone.audit)) == set(names(turned.audit))
    other = result_of(*group(20)).shortlist(2, audit_sample=4, seed=4).groups[0]
    assert names(alone.audit) != names(other.audit)
    # An audit of more than there are takes all; without one the others have no chance.
    (choice,) = result_of(*group(5)).shortlist(2, audit_sample=9).groups
    assert (names(choice.audit), choice.audit[0].inclusion_probability) == (["3", "4", "5"], 1.0)
    (choice,) = result_of(*group(5)).shortlist(2).groups
    assert [c.inclusion_probability for c in choice.group.checkpoints] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("k", "audit", "message"),
    [(0, 0, "k: expected"), (1, -1, "audit_sample: expected")],
)
def test_numbers_out_of_range(k, audit, message):
    with pytest.raises(UsageError, match=message):
        result_of(*group(3)).shortlist(k, audit_sample=audit)


@pytest.mark.parametrize("k", [None, 1])
def test_a_screening_without_a_candidate_has_an_empty_list(k):
    assert result_of().shortlist(k).groups == ()


# --- for lm-eval ----------------------------------------------------------------------------------------


def test_configurations_are_pinned_and_the_manifest_holds_everyone(tmp_path):
    folder = tmp_path / "models of\nmine"
    members = [
        screened("org/a", 1, revision="step1000"),
        screened(str(folder), 2, commit=None),
        screened("org/b-GGUF", 3, file="b-Q4_K_M.gguf"),
        screened("org/c", 4),
    ]
    chosen = result_of(*members).shortlist(3)
    place = emit(
        tmp_path / "list", result_of(*members).head(), chosen, tasks=("gsm8k",), command="screen …"
    )
    files = sorted((tmp_path / "list" / "models").iterdir())
    stems = ["001-org_a-step1000", "002-models_of_mine", "003-org_b-GGUF-b-Q4_K_M.gguf"]
    assert [file.name for file in files] == [f"{stem}.yaml" for stem in stems]
    configs = [yaml.safe_load(file.read_text()) for file in files]
    assert [config["model_args"] for config in configs] == [
        {"pretrained": "org/a", "revision": COMMIT},
        {"pretrained": str(folder)},
        {"pretrained": "org/b-GGUF", "revision": COMMIT, "gguf_file": "b-Q4_K_M.gguf"},
    ]
    assert configs[0]["tasks"] == ["gsm8k"]
    assert len({config["output_path"] for config in configs}) == 3
    assert place == tmp_path / "list" / "manifest.json"
    manifest = read_shortlist_manifest(tmp_path / "list")
    assert [c.chosen for c in manifest.candidates] == ["rank", "rank", "rank", None]
    assert [c.G for c in manifest.candidates] == pytest.approx([1.9, 1.8, 1.7, 1.6])
    content = json.loads(place.read_text())
    assert [c["inclusion_probability"] for c in content["candidates"]] == [1, 1, 1, 0]
    assert content["failed"][0]["repo"] == "org/none"


def test_the_script_races_the_list_where_it_is_started(tmp_path):
    """Folders among its arguments are the caller's; its own are next to it."""
    result = result_of(*group(7))
    emit(tmp_path / "my list", result.head(), result.shortlist(7), tasks=("gsm8k",), command="")
    (tmp_path / "dispersion").write_text('#!/bin/sh\npwd\nprintf "%s|" "$@"\nexit 3\n')
    (tmp_path / "dispersion").chmod(0o755)
    for folder, place in ((tmp_path, "my list"), (tmp_path / "my list", ".")):
        done = subprocess.run(
            ["bash", f"{place}/run.sh", "--include_path", "tasks"],
            **{"cwd": folder, "env": {"PATH": f"{tmp_path}:/usr/bin:/bin"}, "timeout": 60},
            **{"capture_output": True, "text": True},
        )
        given = f"race|{place}|--batch_size|auto|--output_path|{place}/race|--include_path|tasks|"
        assert (done.returncode, done.stdout) == (3, f"{folder}\n{given}")
    assert "sbatch --array=1-7 --gres=gpu:1" in (tmp_path / "my list" / "run.sh").read_text()


def test_what_cannot_be_emitted_is_said_before_the_screening(tmp_path):
    check_emit(tmp_path / "new", MATH, [Target("a/b")])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for folder, domain, names, message in (
        ("full", MATH, [], "new or empty folder"),
        ("full/x", MATH, [], "new or empty folder"),
        ("new", MINE, [], "tasks: expected tasks on which to evaluate"),
        ("new", MATH, ["s3://b/x", "s3://b/y", "a/b"], "got s3://b/x, which lm-eval cannot load"),
        ("new", MATH, ["a/b", "models:/sums/2"], "got models:/sums/2, which lm-eval cannot load"),
    ):
        with pytest.raises(UsageError, match=message):
            check_emit(tmp_path / folder, domain, [Target(name) for name in names])


HEAD = '"schema": "screen-checkpoints-shortlist/2", "candidates": []'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "is not JSON"),
        ('{"schema": "screen-checkpoints/1"}', "has the schema screen-checkpoints/1"),
        ("[]", "holds other JSON"),
        (
            f"{{{HEAD}}}",
            r"is damaged \(`domain`: expected a string, got nothing\); write the list again",
        ),
        (
            f'{{{HEAD}, "domain": "math", "metric": "cosine", "k": 1, "audit_sample": 0}}',
            "at least one",
        ),
    ],
)
def test_manifests_that_cannot_be_read(tmp_path, text, message):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_shortlist_manifest(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("repo", value) for value in (7, "", None, "a\0b")),
        *(("rank", value) for value in (0, -1, 1.5, True, None)),
        *(("G", value) for value in (math.inf, math.nan, "1", None)),
        *(("chosen", value) for value in ("all", 1, True)),
        *(("file", value) for value in ("../x.gguf", "a/b.gguf", "x" * 300)),
        ("revision", []),
        ("family", {}),
        ("ratio", "high"),
    ],
)
def test_a_candidate_of_another_type_or_range_is_damage(tmp_path, key, value):
    result = result_of(*group(3))
    place = emit(
        tmp_path / "list", result.head(), result.shortlist(3), tasks=("gsm8k",), command=""
    )
    content = json.loads(place.read_text())
    content["candidates"][1][key] = value
    place.write_text(json.dumps(content))
    with pytest.raises(
        UsageError, match=rf"is damaged \(`candidates\[1\]\.{key}`: .*; write the list again"
    ):
        read_shortlist_manifest(place)
