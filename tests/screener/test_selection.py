"""Checkpoints by author, words, tags, base model, date or a list, without an API call each."""

from __future__ import annotations

import argparse
import datetime
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from hub_client import whole_gap
from huggingface_hub import constants
from lmeval_screener import screen
from lmeval_screener.cli import main
from lmeval_screener.screening.arguments import ScreenArguments, Selecting
from lmeval_screener.screening.selection import (
    _first_day,
    read_list,
    select,
)

from lmeval_dispersion.arguments import add_options, options_from
from lmeval_dispersion.cli import main as dispersion
from lmeval_dispersion.errors import UsageError

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
V, D = 49_152, 4


@pytest.fixture
def registry(served, tmp_path):
    """The Hub, to which `make` adds checkpoints."""

    def add(name, *, seed=0, shards=1, tied=False, v=V, **settings):
        draw = np.random.default_rng(seed)
        tensors = {"model.embed_tokens.weight": ("F16", draw.normal(size=(v, D)))}
        if not tied:
            tensors["lm_head.weight"] = ("F16", draw.normal(size=(v, D)))
        config = {"model_type": "llama", "tie_word_embeddings": tied, "seed": seed}
        folder = write_checkpoint(tmp_path / name, tensors, config=config, shards=shards)
        shutil.copy(TOKENIZERS / "smollm2.json", folder / "tokenizer.json")
        served.add(name, folder, parameters=2 * V * D, **settings)
        return folder

    served.make = add
    return served


def chosen(*words, names=()):
    """The targets that options and names select."""
    parser = argparse.ArgumentParser()
    add_options(parser, Selecting)
    given = parser.parse_args(words, argparse.Namespace(checkpoints=names))
    return select(options_from(ScreenArguments, given))


def means(result):
    return {found.repo: found.gaps["cosine"].mean for found in result.checkpoints}


@pytest.fixture
def family(registry, tmp_path):
    """A base model, its fine-tunes of two organisations, and a repository without weights; by last change."""
    tuned = "base_model:finetune:acme/base-1"
    names = ("acme/base-1", "acme/tuned-1", "acme/tuned-2", "acme/tuned-3", "other/tuned-9")
    for number, name in enumerate(names):
        labels = [tuned, "math" if number > 1 else "code"] if number else []
        registry.make(name, v=9, labels=labels, changed=f"2026-0{number + 3}-01T00:00:00.000Z")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "README.md").write_text("nothing here")
    (tmp_path / "texts" / "training_args.bin").write_text("nor here")
    registry.add("acme/only-texts", tmp_path / "texts", changed="2026-10-01T00:00:00Z")
    return registry


@pytest.mark.parametrize(
    ("words", "names", "expected"),
    [
        ([], ["acme/*"], "tuned-3 tuned-2 tuned-1 base-1"),
        ([], ["hf://acme/tuned-[12]*"], "tuned-2 tuned-1"),
        ([], ["https://huggingface.co/acme/tuned-1"], "tuned-1"),
        (["--author", "acme"], [], "tuned-3 tuned-2 tuned-1 base-1"),
        (["--base-model", "acme/base-1"], [], "tuned-9 tuned-3 tuned-2 tuned-1"),
        (
            ["--base-model", "acme/base-1", "--author", "acme", "--tag", "math"],
            [],
            "tuned-3 tuned-2",
        ),
        (["--author", "acme", "--author", "other"], [], "tuned-3 tuned-2 tuned-1 base-1 tuned-9"),
        (["--author", "acme", "--limit", "2"], [], "tuned-3 tuned-2"),
        (["--author", "acme", "--since", "2026-05-01"], [], "tuned-3 tuned-2"),
        (["--author", "acme", "--since", "2026-05-02"], [], "tuned-3"),
    ],
)
def test_what_names_and_options_select(family, words, names, expected):
    family.page = 2  # lists go on over pages
    found = [target.repo.partition("/")[2] for target in chosen(*words, names=names).targets]
    assert " ".join(found) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a/b\n\n# all of it\n  a/c@step1  # the first\n./x\n", ["a/b", "a/c@step1", "./x"]),
        ("repo,accuracy\na/b,0.5\na/c,0.25\n", ["a/b", "a/c"]),
        ("accuracy,name,revision\n0.5,a/b,main\n0.1,a/c,\n", ["a/b@main", "a/c"]),
        ("a/b,0.5\na/c,0.7\n", ["a/b", "a/c"]),
        ('"with, comma",1\n', ["with, comma"]),
        ("\ufeffa/b\r\na/c\r\n", ["a/b", "a/c"]),
    ],
)
def test_lists(content, expected):
    assert read_list(io.TextIOWrapper(io.BytesIO(content.encode()), "utf-8")) == expected


def test_a_list_that_is_none():
    for content, said in (
        (b"# nothing\n", "got none"),
        (b"\xff\xfe\x00", "expected a list of checkpoints on standard input"),
    ):
        with pytest.raises(UsageError, match=said):
            read_list(io.TextIOWrapper(io.BytesIO(content), "utf-8"))


def test_names_lists_and_selections_together_name_each_checkpoint_once(family, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("acme/base-1\nother/tuned-9@main\n"))
    found = chosen("--author", "acme", names=["-", "other/*", "acme/tuned-1", "acme/tuned-1"])
    labels = "acme/base-1 other/tuned-9@main other/tuned-9 acme/tuned-1 acme/tuned-3 acme/tuned-2"
    assert " ".join(target.label for target in found.targets) == labels
    assert [target.listed is None for target in found.targets] == [
        False,
        True,
        False,
        False,
        False,
        False,
    ]
    assert (
        found.sentence
        == "6 repositories listed, 5 selected, each at its current commit; left out: 1 without weights"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--author", "nobody"], "expected models on the Hub for nobody/\\*"),
        (["--author", "a/b"], "author: expected ORG"),
        (["--base-model", "b"], "base_model: expected ORG/NAME"),
        (
            ["--since", "soon"],
            "since: expected a date such as 2026-10-31, or yesterday, got 'soon'",
        ),
        (["--since", "last"], "since: 'last' needs a registry"),
        (["--since", "yesterday"], "expected a listing of the Hub.* or a registry"),
        (["--limit", "0"], "limit: expected at least 1"),
        (["--limit", "3"], "expected a listing of the Hub"),
    ],
)
def test_a_selection_of_nothing_is_refused_with_a_sentence(family, words, said):
    with pytest.raises(UsageError, match=said):
        chosen(*words, names=["acme/tuned-1"])


def test_yesterday_is_a_day():
    today = datetime.datetime.now(datetime.timezone.utc).date()
    days = (today - datetime.timedelta(1), today)  # midnight may pass
    assert _first_day("yesterday") in days


def test_selected_checkpoints_cost_three_requests_and_known_ones_none(registry, monkeypatch):
    """Every G is that of the whole matrix; a second run asks for the list only, offline for nothing."""
    folders = {f"acme/m{n:02d}": registry.make(f"acme/m{n:02d}", seed=n) for n in range(9)}
    folders["acme/tied"] = registry.make("acme/tied", seed=50, tied=True)
    folders["acme/sharded"] = registry.make("acme/sharded", seed=51, shards=2)
    registry.page = 4
    result = screen(["acme/*"])
    assert not result.failed
    for checkpoint in result.checkpoints:
        expected = whole_gap(folders[checkpoint.repo], checkpoint)
        assert checkpoint.gaps["cosine"].mean == pytest.approx(expected, abs=1e-6)
        assert checkpoint.revision == registry.repositories[checkpoint.repo].branches["main"]
    assert len(result.checkpoints) == 11
    assert not registry.seen("api")
    assert len(registry.seen("list")) == 3
    assert len(registry.seen("resolve")) == 3 * 11 + 2, (
        "digest, text, weights; an index, a tokenizer"
    )
    assert result.requests == len(registry.requests)
    registry.requests.clear()
    again = screen(["acme/*"])
    assert [request.part for request in registry.requests] == ["list"] * 3
    assert means(again) == means(result)
    registry.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert means(screen(["acme/*"])) == means(result)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    pinned = screen([f"{c.repo}@{c.revision}" for c in result.checkpoints])
    assert not pinned.failed
    assert not registry.requests, "what is pinned and cached costs nothing at all"


def test_the_command_selects_plans_and_says_what_it_left_out(family, registry, capsys, monkeypatch):
    """Gated ones fail by name, without a request."""
    quotas = {"api": (9, 9), "resolvers": (5, 5)}
    monkeypatch.setattr("lmeval_screener.result.planning.QUOTAS", quotas)
    for number in range(1, 4):
        registry.make(f"acme/tuned-{number}", seed=number)
    registry.make("acme/base-1")
    registry.make("acme/closed", v=9, gated=True)
    assert main(["acme/*", "--dry-run", "--format", "json"]) == 0
    told = capsys.readouterr()
    plan = json.loads(told.out)
    taken = (
        "6 repositories listed, 5 selected, each at its current commit; left out: 1 without weights"
    )
    assert f"{taken}." in plan["answer"]
    assert taken not in told.err, "once"
    assert plan["answer"][0].startswith(
        "4 of 5 checkpoints would be read, with an estimated maximum of 12 resolver"
    )
    assert "quota for resolver requests makes the screening last 10 min" in plan["answer"][0]
    assert plan["answer"][1] == "Without a request: 1 gated."
    assert not registry.seen("resolve")
    assert main(["s3://box/run", "acme/base-1@step*", "--dry-run", "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    rows = plan["tables"]["plan"]["rows"]
    assert [row["resolvers"] for row in rows] == [0, 4], "only the Hub has quotas"
    assert plan["answer"][-1].startswith("A pattern of revisions counts as one checkpoint")
    assert main(["acme/*", "--format", "json"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert len(result["checkpoints"]) == 4
    assert [(failed["repo"], failed["error"]) for failed in result["failed"]] == [
        ("acme/closed", "GatedRepo")
    ]
    assert not [request for request in registry.requests if "closed" in request.path]


# --- the base that the listings name ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tags", "base"),
    [
        (["finetune:acme/base-1", "adapter:acme/base-1"], True),
        (["finetune:acme/base-1", ""], False),
        (["finetune:acme/base-1", "finetune:acme/base-2"], False),
        (["merge:acme/base-1", "quantized:acme/base-1"], False),
        (["finetune:acme/base-1 finetune:acme/base-2"] * 2, False),
        (["finetune:acme/none"] * 2, False),  # not there: nothing is said
        (["finetune:acme/base-1"], False),  # alone
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_a_base_that_all_name_is_found_at_no_request_of_theirs(registry, listed, tags, base):
    registry.make("acme/base-1", seed=9)
    tuned = [f"acme/tuned-{number}" for number in range(len(tags))]
    for seed, (name, words) in enumerate(zip(tuned, tags, strict=True)):
        registry.make(
            name, seed=seed, labels=["math", *(f"base_model:{tag}" for tag in words.split())]
        )
    names = ["acme/tuned-*"] if listed else tuned
    found = screen(names)
    labels = [c.label for c in found.checkpoints if c.is_base]
    assert {c.label for c in found.checkpoints} == {*tuned, *labels}
    assert (labels, found.base) == (["acme/base-1"] * base, "acme/base-1" * base)
    assert (found.failed, found.exit_code) == ((), 0)
    assert (
        "acme/base-1: taken as the base, because the other checkpoints name it as their base"
        in found.to_markdown()
    ) == base
    api = [request.path for request in registry.requests if request.path.startswith("/api/models")]
    of_base = [path for path in api if "base-1" in path or "none" in path]
    assert len(api) - len(of_base) == (1 if listed else len(tags)), api
    assert len(of_base) <= base + ("none" in str(tags)), (
        "asked for once, and only where all name it"
    )
    # What was asked for is what is read again, from caches; the base is known by then, and found.
    again = screen(names)
    assert [(c.label, c.is_base) for c in again.checkpoints] == [
        (c.label, c.is_base) for c in found.checkpoints
    ]


def test_a_registry_knows_the_bases_of_its_last_run(registry, tmp_path, capsys):
    store = str(tmp_path / "r.db")
    for seed in range(6):
        label = ["base_model:finetune:acme/t0"] if seed in (1, 2) else []
        registry.make(f"acme/t{seed}", seed=seed, labels=label)

    def asked(*words):
        capsys.readouterr()
        assert dispersion(["registry", *words, "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    def bases(*words):
        return [
            row["checkpoint"]
            for row in asked("query", store, *words)["rows"]
            if row["note"] == "the base"
        ]

    def worth(*words):
        return asked("diff", store, "2026-01-01", *words)["worth"]

    # Found by itself in the first run; from the registry, without a request, in the second.
    news = screen(["acme/t1", "acme/t2"], registry=store, since="last").news
    assert "acme/t0" not in news.worth
    assert worth() == list(news.worth)
    assert bases() == ["acme/t0"]
    assert [
        c.label for c in screen(["acme/t1", "acme/t2"], registry=store).checkpoints if c.is_base
    ] == bases()
    # What names none is added: the run's base stands, as long as no run and no option says another.
    screen(["acme/t3", "acme/t4", "acme/t5"], registry=store)
    assert (bases(), bases("--base", "acme/t3")) == (["acme/t0"], ["acme/t3"])
    assert "acme/t3" not in worth("--base", "acme/t3")
    best, *_ = (row["checkpoint"] for row in asked("query", store)["rows"])
    top = asked("query", store, "--top", "1", "--base", best)["rows"]
    assert (top[0]["checkpoint"], len(top)) == (best, 2), "a base takes no place"
    assert dispersion(["registry", "diff", store, "last", "--base", "acme/none"]) == 2
    assert "got acme/none; did you mean" in capsys.readouterr().err
