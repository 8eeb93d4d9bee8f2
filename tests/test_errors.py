"""One error, two languages: Python names the argument, a command its option."""

import ast
import re
from pathlib import Path

import pytest

import lmeval_dispersion as d
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import DispersionError
from lmeval_dispersion.installation import data_folder

ROOT = Path(__file__).parents[1]
MODEL, RUN = str(data_folder("demo") / "sums-00"), str(data_folder("demo_runs") / "sums-30")
TEXTS = "texts.txt"
DATA = f"{MODEL} --data {TEXTS}"
COMMANDS = (
    "cli.py",
    "commands.py",
    "options.py",
    "output.py",
    "terminal.py",
    "cells.py",
)  # and reports' ends
OPTIONS = r"(.*\.)?(add|add_\w+|several|what|how|show)$"  # functions that declare some


# Words of a command, the same call in Python, the option and the argument.
ERRORS = [
    (
        f"calibrate {RUN} --where a>1 -o c.json",
        lambda: d.calibrate(RUN, where="a>1"),
        "where",
        "where",
    ),
    (
        f"calibrate {RUN} --slice correct -o c.json",
        lambda: d.calibrate(RUN, slice="correct"),
        "slice",
        "slice",
    ),
    (f"inspect law {DATA} --bins 1", lambda: d.law(MODEL, TEXTS, bins=1), "bins", "bins"),
    (
        f"inspect law {DATA} --bin-size 2",
        lambda: d.law(MODEL, TEXTS, bin_size=2),
        "bin-size",
        "bin_size",
    ),
    (
        "screen --demo --registry no/r",
        lambda: d.screen(demo=True, registry="no/r"),
        *("registry", "registry"),
    ),
    ("screen --demo --shortlist 0", lambda: d.screen(demo=True).shortlist(0), "shortlist", "k"),
    (
        "screen --demo --shortlist 1 --audit-sample -1",
        lambda: d.screen(demo=True).shortlist(1, audit_sample=-1),
        *("audit-sample", "audit_sample"),
    ),
    ("race x --tasks t --margin 2", lambda: d.race("x", tasks="t", margin=2.0), "margin", "margin"),
    ("race x", lambda: d.race("x"), "tasks", "tasks"),
    (
        "race x --tasks t --model_args revision=a",
        lambda: d.race("x", tasks="t", model_args="revision=a"),
        *("model_args", "model_args"),
    ),
]


@pytest.mark.parametrize(
    ("words", "call", "option", "argument"), ERRORS, ids=[case[2] for case in ERRORS]
)
def test_a_command_names_the_option_and_python_the_argument(
    words, call, option, argument, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / TEXTS).write_text("12 + 30 = 42.\n\nIt was late.\n")
    assert main(words.split()) == 2
    assert re.match(rf"dispersion [a-z ]+: --{option}: ", capsys.readouterr().err)
    with pytest.raises(DispersionError) as caught:
        call()
    assert str(caught.value).startswith(f"{argument}: ")
    assert "--" not in str(caught.value)


def test_only_commands_name_options():
    """A message of the library names an option only in a command that it quotes, as the next step."""
    named = []
    for path in [*ROOT.glob("lmeval_dispersion/**/*.py"), *ROOT.glob("screener/**/*.py")]:
        if path.name not in COMMANDS:
            named += [(path.name, text) for text in messages(ast.parse(path.read_text("utf-8")))]
    assert not [
        (name, text) for name, text in named if re.search(" --[a-z]", re.sub("`[^`]*`", "", text))
    ]
    assert len(named) > 5000


def messages(tree):
    """All texts of a module but docstrings, scripts, and help of options."""
    if isinstance(tree, ast.Constant | ast.JoinedStr):
        parts = getattr(tree, "values", [tree])
        text = "".join(
            str(getattr(part, "value", "")) if isinstance(part, ast.Constant) else "…"
            for part in parts
        )
        yield "" if text.startswith("#!") else text
    for child in ast.iter_child_nodes(tree):
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        is_option = isinstance(child, ast.Call) and re.match(OPTIONS, ast.unparse(child.func))
        if not (is_docstring or is_option or isinstance(tree, ast.JoinedStr)):
            yield from messages(child)


def test_a_misspelt_argument_of_a_race_is_named_before_anything_is_screened():
    with pytest.raises(TypeError, match=r"race\(\) got an unexpected keyword argument 'batchsize'"):
        d.race("x", tasks="t", batchsize=4)
