"""The first commands of somebody with fine-tunes of his own: a folder, a slip, a name of nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from lmeval_screener import screen
from lmeval_screener.cli import main
from lmeval_screener.screening.arguments import ScreenArguments
from lmeval_screener.screening.selection import query_of, select
from lmeval_screener.targets.names import Target, parse_targets, shared_name

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder

DEMO = data_folder("demo")
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0f\nsize 246152\n"
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def counted(served, tmp_path, monkeypatch):
    """A Hub that holds nothing and counts what it is asked, and an empty folder to stand in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return served


def model(place, name="sums-80"):
    os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
    shutil.copytree(DEMO / name, place)  # the tokenizer's link is followed


@pytest.fixture
def myruns(counted):
    for name in ("80", "45", "20", "05"):
        model(f"myruns/ft-{name}", f"sums-{name}")
    os.truncate(f"myruns/ft-20/{FIRST}", 1000)
    os.remove(f"myruns/ft-05/{FIRST}")
    os.mkdir("myruns/notes")
    os.mkdir("myruns/.git")
    return counted


@pytest.mark.parametrize("text", ["myruns", "myruns/", "./myruns", "myruns/../myruns"])
def test_a_folder_of_checkpoints_is_screened_what_is_broken_fails_and_the_rest_is_named(
    myruns, capsys, text
):
    assert main([text]) == 3
    out, err = capsys.readouterr()
    assert out.startswith("Evaluate first: ft-80, ft-45 (all 2, highest ratio first; math).\n")
    assert "2 of 4 checkpoints could not be screened (1 BadIndex, 1 BadHeader)." in out
    assert "\nmyruns · 370K · one tokenizer · 2 checkpoints\n" in out
    assert "tokenizer:" not in out
    assert re.search(r"1  ▶ ft-80 .*\n +2  ▶ ft-45 ", out)
    assert "wait until it is complete, or save or copy it again" in " ".join(out.split())
    assert re.fullmatch(
        r"screen-checkpoints: folders left out, as they hold no model \(config.json and weights\): "
        r"\S*myruns/notes\n",
        err,
    )
    result = screen(text)
    assert {c["group"] for c in result.to_dict()["checkpoints"]} == {
        "myruns · 370K · one tokenizer"
    }
    assert result.best.family.startswith("tokenizer:")
    assert not myruns.requests


def test_inside_a_folder_a_final_model_counts_once_and_steps_are_no_checkpoint_of_it(counted):
    model("myruns/a", "sums-80")
    model("myruns/a/checkpoint-5", "sums-45")
    model("myruns/b/checkpoint-5", "sums-45")
    selected = select(ScreenArguments(["myruns"]))
    assert [target.repo for target in selected.targets] == ["myruns/a"]
    assert selected.left_out == ["myruns/b"]
    steps = ["myruns/a/checkpoint-5", "myruns/a", "myruns/b/checkpoint-5"]
    assert [target.repo for target in parse_targets("myruns/*")] == steps


def test_what_lies_deeper_is_named_as_the_pattern_that_screens_it(counted, capsys):
    for place in ("group/a/ft-1", "group/b/ft-2", "far/a/b/ft-1"):
        model(place)
    for text, pattern in (("group", "group/*/*"), ("far", "far/*/*/*")):
        assert main([text]) == 1
        assert f"; name them all: '{pattern}'\n" in capsys.readouterr().err
        assert main([pattern, "-q"]) == 0
    assert not counted.requests


@pytest.mark.parametrize(
    ("gone", "instead", "says"),
    [
        (
            FIRST,
            "link",
            f"FileNotFound: m/{FIRST} links to ../gone, which is gone (perhaps a purged cache); download it "
            "again, or copy the folder with its links followed (cp -rL)",
        ),
        (
            "*.safetensors",
            LFS,
            f"FileNotFound: m/{FIRST} is a git-lfs pointer, not the file itself; run: git",
        ),
        ("tokenizer.json", LFS, "FileNotFound: m/tokenizer.json is a git-lfs pointer"),
        (
            "*safetensors*",
            "shards",
            "NoSafetensors: cannot be screened because its weights are shards of to",
        ),
    ],
)
def test_a_checkpoint_that_is_not_all_there_says_how_to_get_it(
    counted, capsys, gone, instead, says
):
    model("m")
    for file in list(Path("m").glob(gone)):
        file.unlink()
        if instead == "link":
            file.symlink_to("../gone")
        elif instead == "shards":
            Path("m/__0_0.distcp").touch()
        else:
            file.write_text(instead)
    assert main(["m"]) == 1
    assert says in capsys.readouterr().err
    assert not counted.requests


def test_what_is_broken_beside_the_weights_that_are_read_stops_nothing(counted):
    model("m")
    os.symlink("../gone", "m/pytorch_model.bin")
    os.symlink("../gone", "m/README.md")
    assert not screen("m").failed


LOCAL = {
    "odd/nosuch": "that folder does not exist: check the path, or name the Hub's repository hf://odd/nosuch",
    "odd/nosuch@main": "that folder does not exist",
    "odd/nosuch:Q4_K_M": "that folder does not exist",
    "myruns/ft-8": "did you mean myruns/ft-80?",
    "odd/zz*": "which matches nothing",
    "odd/a/zz*": "which matches nothing",
    "zz*": "the pattern matches no local path",
    "loop": "a broken link",
    "pipe": "which is neither",
    "nowhere/": "that folder does not exist",
    "x/weights.bin": "that file does not exist",
    "./m.gguf": "that file does not exist",
    "myrnus": "did you mean myruns?",
    "demo": "the bundled demo: run `screen-checkpoints --demo`",
    "qwen2.5": "a family: run `screen-checkpoints --family qwen2.5`",
    "llama": "(llama2, llama3): run `screen-checkpoints --family llama2`",
    "Qwen2.5": "a family: run `screen-checkpoints --family qwen2.5`",
    "gpt2": "name the Hub's repository hf://gpt2",
}


# A name without owner may be a tokenizer's repository; a floor is one checkpoint, never a pattern.
WAYS = [("", text) for text in LOCAL] + [
    ("--fail-if-below", text) for text in LOCAL if "*" not in text
]
WAYS += [
    ("--tokenizer", text) for text in (*filter(lambda text: "/" in text, LOCAL), "loop", "pipe")
]


@pytest.mark.parametrize(("way", "text"), WAYS)
def test_no_name_of_something_here_goes_to_the_hub(counted, capsys, way, text):
    model("myruns/ft-80")
    os.mkdir("odd")
    os.symlink("loop", "loop")
    os.mkfifo("pipe")
    assert main(["myruns/ft-80", way, text] if way else [text]) in (1, 2)
    assert LOCAL[text] in " ".join("".join(capsys.readouterr()).split())
    assert not counted.requests


def test_hf_and_names_of_nothing_here_do_go_to_the_hub(counted):
    os.mkdir("odd")
    for text in ("hf://odd/nosuch", "org/name", "hf://gpt2", "gpt2@main", "bert-base"):
        assert [failed.error for failed in screen(text).failed] == ["RepoNotFound"]
    assert query_of("hf://odd/*") is not None
    assert query_of("odd/*") is None


@pytest.mark.parametrize(("reached", "code"), [(True, "RepoNotFound"), (False, "Unreachable")])
def test_a_bare_name_that_is_nowhere_is_not_a_folder_here_either(
    counted, monkeypatch, reached, code
):
    if not reached:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    (failed,) = screen("nothere").failed
    assert (failed.error, "no folder here is called nothere, and " in failed.message) == (
        code,
        True,
    )
    os.mkdir("there")
    assert "no folder here" not in screen("hf://there").failed[0].message
    assert "no folder here" not in screen("org/nothere").failed[0].message


def test_a_misspelt_tokenizer_is_refused_where_no_checkpoint_needs_it(counted, capsys):
    model("m")
    for name in ("org/nosuch", "nosuch", "./nosuch", "m/nosuch.json"):
        assert main(["m", "--tokenizer", name]) == 2
        assert f"screen-checkpoints: tokenizer {name}" in capsys.readouterr().err
    assert main(["m", "--tokenizer", "m", "-q"]) == 0


@pytest.mark.parametrize("names", [["m"], ["--demo"]])
def test_a_tokenizer_that_no_hub_can_be_asked_for_is_refused(counted, capsys, monkeypatch, names):
    model("m")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert main([*names, "--tokenizer", "nosuch"]) == 2
    said = capsys.readouterr().err
    assert (
        "tokenizer nosuch is not an existing folder or file, and cannot be read from the Hub"
        in said
    )
    assert "check the network" in said
    # A nightly goes on: what needs the tokenizer keeps its last figures.
    assert main([*names, "--tokenizer", "nosuch", "--registry", "r.db", "-q"]) == 0


def test_a_misspelt_label_of_the_gate_is_refused_and_asks_nothing(counted, capsys):
    assert main(["--demo", "--fail-if-below", "sums-99"]) == 2
    assert "got 'sums-99'; did you mean sums-80" in capsys.readouterr().err
    assert not counted.requests


def test_nothing_at_all_names_the_demo_and_the_help(counted, capsys):
    assert main([]) == 2
    assert "--demo" in (said := capsys.readouterr().err)
    assert "--help" in said
    with pytest.raises(UsageError):
        screen()


def test_two_groups_never_share_a_title_and_places_apart_share_no_name(counted):
    """Another tokenizer under the same folder: each group is called by the tokenizer of its best."""
    for name in ("a/80", "a/45", "b/80", "b/45"):
        model(f"runs/{name.replace('/', '-')}", f"sums-{name[2:]}")
    tree = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    vocabulary = tree["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    for place in ("runs/b-80", "runs/b-45"):
        with open(f"{place}/tokenizer.json", "w") as file:
            json.dump(tree, file)
    titles = {group.title for group in screen("runs").groups}
    assert titles == {f"runs · 370K · tokenizer of {name}-80" for name in "ab"}
    (alone,) = screen(["runs/a-80"]).groups
    assert alone.title == "a-80 · 370K · one tokenizer"
    assert shared_name([Target("/a/x", local=True), Target("/b/y", local=True)]) == ""
    assert shared_name([Target("org/x"), Target("org/y")]) == "org"
    assert shared_name([Target("org/x"), Target("/org/y", local=True)]) == ""
