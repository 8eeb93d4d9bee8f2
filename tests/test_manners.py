"""Every command has the same manners: its help is walked over, and what it promises is tried."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from lmeval_dispersion.cli import COMMANDS, GONE, JOBS, main, parser_of
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.report.document import SITE

# One spelling a meaning. A new metavar belongs here only where none of these says what is meant.
METAVARS = {
    *("FILE", "FOLDER", "FILE|HUB_ID", "HUB_ID|FOLDER", "MODEL", "RUN", "CHECKPOINT"),
    *("MANIFEST", "RESULTS", "SOURCE", "URL", "REVISION", "DATE", "DEVICE", "ARGUMENT", "EXPR"),
    *("N", "N,N", "K", "X", "SECONDS", "TOKENS", "NAME", "NAME,NAME", "K=V,K=V", "SET", "LAYER"),
    *("COLUMN", "FIELD", "[TASK=][FILTER/]METRIC", "N|N%"),
}
ROOT = Path(__file__).parents[1]
# Other words for --layer, --seed, --study and --format.
RETIRED = {"--layers", "--seeds", "--run", "--json"}


def actions(name):
    return [a for a in parser_of(name)[0]._actions if not isinstance(a, argparse._HelpAction)]


def options(name):
    return {text: action for action in actions(name) for text in action.option_strings}


@pytest.mark.parametrize("name", COMMANDS)
def test_metavars_and_defaults_are_said_the_same_way(name):
    for action in actions(name):
        assert action.help, action.dest
        if action.choices is None and action.nargs != 0:
            assert action.metavar in METAVARS, action.dest
        if action.option_strings and action.nargs != 0 and not action.required:
            text = action.help.replace("%(default)s", str(action.default))
            assert re.search(r"\(default: [^)]+\)$", text), (
                f"{name} {action.option_strings}: {text}"
            )
        silent = action.default in (None, [], False, argparse.SUPPRESS) or isinstance(
            action.default, tuple
        )
        if not silent:
            said = action.help % {"default": action.default}
            assert str(action.default).removesuffix(".0") in said, action.dest


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_begins_with_two_examples_that_parse_and_ends_with_the_docs(name):
    parser, _ = parser_of(name)
    text = parser.format_help()
    head, _, block = text.partition("\nexamples:\n")
    examples = block.partition("\n\n")[0].splitlines()
    assert "\n  -h, --help" not in head
    assert text.endswith(f"\ndocumentation and shell completion:\n  {SITE}reference/commands/\n")
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(re.split(r" (?:&&|[|>]) ", example)[0])
        called = ["dispersion", *name.split()]
        assert words[: len(called)] == called
        parser.parse_args(words[len(called) :])


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"run"}))
def test_no_option_can_be_abbreviated_and_none_has_another_name(name):
    assert not parser_of(name)[0].allow_abbrev
    assert not set(options(name)) & RETIRED


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("inspect law m --data t --dtype=bfloat16", "; did you mean --model_args dtype=…?"),
        ("embed m t.txt -o run --adapter x", "; did you mean --model_args peft=…?"),
        ("screen --demo --json", "; did you mean --format json?"),
        ("audit RUN --csv", "; did you mean --format csv?"),
        ("embed --model m t.txt -o run", "; did you mean MODEL without --model?"),
        ("enable --status", "; did you mean status without --status?"),
        ("screen --demo --shortlst 3", "; did you mean --shortlist?"),
        ("screen --demo --top 3", "; did you mean --shortlist?"),
        ("registry query seen.db --shortlist 3", "; did you mean --top?"),
        ("race runs/a --tasks t runs/b", "; put CHECKPOINT before the options"),
        ("tokens gsm8k --search x", ""),
        ("audit RUN --foobar", ""),
    ],
)
def test_a_suggestion_is_made_only_where_it_helps(words, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    assert ended.value.code == 2
    assert hint in (shown := capsys.readouterr().err)
    assert ("did you mean" in shown) == ("did you mean" in hint)


@pytest.mark.parametrize(
    ("name", "option"),
    [("audit", "--layer"), ("calibrate", "--slice"), ("compare", "--layer"), ("screen", "--base")],
)
def test_what_holds_one_value_refuses_a_second(name, option, capsys):
    parser, folders = parser_of(name)[0], ["x"] if name in ("audit", "calibrate") else ["x", "y"]
    with pytest.raises(SystemExit):
        parser.parse_args([option, "a", option, "b", *folders])
    assert f"expected {option} once" in capsys.readouterr().err
    assert "a" in vars(parser.parse_args([option, "a", *folders])).values()


def test_the_overview_lists_every_command_under_its_job(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert main(["help"]) == 0
    assert capsys.readouterr().out == text
    for job, commands in JOBS.items():
        block = text.partition(f"\n{job}:\n")[2].partition("\n\n")[0]
        assert [line[2:].split("  ")[0] for line in block.splitlines()] == list(commands)
    assert max(map(len, text.splitlines())) <= 90
    assert "  dispersion screen --demo" in text.partition("examples:")[2]


@pytest.mark.parametrize("name", GONE)
def test_a_former_command_is_answered_by_what_does_its_work(name, capsys):
    assert main([name, "a", "b"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    command = re.search("`dispersion ([a-z]+) ", line)
    if command is None:
        assert "lmeval_dispersion.RaceCallback" in line
    else:
        assert command[1] in COMMANDS


@pytest.mark.parametrize("words", ["inspect --help", "help inspect", "help inspect law"])
def test_inspect_lists_its_measures_with_their_own_options(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for measure, option in [("law", "--bins"), ("sublayers", "--sizes"), ("clusters", "--ngram")]:
        assert f"{measure}: " in " ".join(text.split())
        assert text.partition(f"\n{measure}:\n")[2].startswith(f"  {option} ")


def test_dispersion_screen_is_screen_checkpoints(capsys, monkeypatch):
    from lmeval_screener.cli import main as screen_checkpoints

    monkeypatch.setenv("COLUMNS", "100")
    texts = []
    for call in (lambda: main(["screen", "--help"]), lambda: screen_checkpoints(["--help"])):
        with pytest.raises(SystemExit):
            call()
        text = capsys.readouterr().out.replace("dispersion screen", "screen-checkpoints")
        texts.append(" ".join(text.split()))
    assert texts[0] == texts[1]
    monkeypatch.setenv("COLUMNS", "80")
    lines = parser_of("screen")[0].format_help().splitlines()
    assert lines[0] == "usage: dispersion screen [options] CHECKPOINT ..."
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 80
    assert main(["screen", "--list", "domains", "--format", "json"]) == 0
    assert '"command": "dispersion screen --list domains --format json"' in capsys.readouterr().out


@pytest.mark.parametrize("words", [["audit"], ["calibrate", "-o", "calibrator.json"]])
def test_quiet_leaves_standard_error_empty(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*words, str(data_folder("demo_runs") / "sums-30")]
    assert main([*words, "-q"]) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    assert main(words) == 0
    assert capsys.readouterr().out == quiet.out


def test_the_surface_stays_small():
    """Commands, and the options in their help; what several analyses share counts once."""
    entries = {}
    for name in COMMANDS:
        shown = [action.option_strings for action in parser_of(name)[0]._actions]
        entries.setdefault(name.split()[0], set()).update(names[-1] for names in shown if names)
    assert len(entries) <= 12
    assert sum(map(len, entries.values())) <= 189


def test_four_phrases_of_the_style_guide_stay_away():
    phrase = r"(?<!here )\b(is|are) no (?!longer|better|more|faster)|stands? for|(told|tells?)( \w+)? apart"
    phrase += r"|\bbeside\b"
    for path in (
        p for room in ("lmeval_dispersion", "screener", "docs") for p in (ROOT / room).rglob("*.*")
    ):
        if path.suffix in (".py", ".jinja", ".yaml", ".md") and "results" not in path.parts:
            assert not re.search(phrase, " ".join(path.read_text("utf-8").split())), path
