"""The public surface: the names, where they come from, and which modules are nobody's to import."""

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lmeval_screener.registry.commands import Questioned
from lmeval_screener.screening.arguments import ScreenArguments
from lmeval_screener.shortlist.arguments import Verifying

import lmeval_dispersion
from lmeval_dispersion.auditing.arguments import Auditing, Calibrating, Comparing
from lmeval_dispersion.cli import COMMANDS, parser_of
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.harness.arguments import AnswerTokens, Embedding
from lmeval_dispersion.laboratory.arguments import Clusters, Condensation, Law, Sublayers
from lmeval_dispersion.laboratory.commands import MEASURES
from lmeval_dispersion.racing.arguments import Racing

ROOT = Path(lmeval_dispersion.__file__).parent
EXAMPLES = ROOT.parent / "examples"


def test_the_stub_is_the_one_list_and_dir_shows_it():
    imports = [
        node
        for node in ast.parse((ROOT / "__init__.pyi").read_text("utf-8")).body
        if isinstance(node, ast.ImportFrom)
    ]
    names = {str(name.asname) for node in imports for name in node.names} - {"__version__"}
    assert lmeval_dispersion.__all__ == dir(lmeval_dispersion) == sorted(names)
    starred = {}
    exec("from lmeval_dispersion import *", starred)
    assert names <= set(starred)


@pytest.mark.parametrize("name", lmeval_dispersion.__all__)
def test_every_name_is_there_and_says_what_it_is(name):
    value = getattr(lmeval_dispersion, name)
    assert inspect.getdoc(value)


def test_every_command_is_a_function_too():
    """``run`` and ``enable`` are lm-eval's command line; a measure of ``inspect`` has its own."""
    assert {*COMMANDS} - {"run", "enable", "inspect"} <= set(lmeval_dispersion.__all__)


def test_a_near_name_is_offered():
    with pytest.raises(AttributeError, match="no attribute 'scren'; did you mean screen"):
        lmeval_dispersion.scren  # noqa: B018
    assert not hasattr(lmeval_dispersion, "__wrapped__")


def test_a_public_module_shows_its_public_names():
    pytest.importorskip("torch")
    shown = dir(lmeval_dispersion.losses)
    assert {"push_away", "angular_spread", "DispersionLoss"} <= set(shown)
    assert not {"torch", "Tensor", "wraps"} & set(shown)


def test_the_functions_of_commands_answer_as_they_do(tmp_path):
    file = tmp_path / "r.db"
    screened = lmeval_dispersion.screen("demo", registry=file)
    assert len(screened) == 11
    found = lmeval_dispersion.registry(file)
    assert found["sums-80"].rank == screened["sums-80"].rank == 1
    assert len(lmeval_dispersion.registry(file, "query", "SELECT 1 AS a")) == 1
    assert len(lmeval_dispersion.registry(file, "diff", since="2020-01-01")) == 11
    with pytest.raises(UsageError, match="since: query does not use this"):
        lmeval_dispersion.registry(file, since="last")
    with pytest.raises(UsageError, match="expected the manifest of a short list"):
        lmeval_dispersion.verify(tmp_path)


def test_dir_of_a_result_has_only_what_is_for_users():
    result = lmeval_dispersion.screen(demo=True)
    names = {name for name in dir(result) if not name.startswith("_")}
    assert {"best", "groups", "shortlist", "verify", "to_frame", "to_html", "plot"} <= names
    assert not names & {
        "template",
        "context",
        "guide",
        "libraries",
        "document",
        "head",
        "shown",
        "chosen",
    }


def test_functions_take_no_class_that_is_not_public():
    public = {name for name in lmeval_dispersion.__all__ if name[0].isupper()}
    known = public | {
        "Literal",
        "None",
        "Path",
        "Sequence",
        "Iterable",
        "Callable",
        "Mapping",
        "Any",
    }
    known |= {"Metric", "RankBy", "Distance"}  # literals
    for name in ("screen", "embed"):
        taken = inspect.signature(getattr(lmeval_dispersion, name)).parameters.values()
        words = set(
            re.findall(r"\b[A-Z]\w+", " ".join(str(parameter.annotation) for parameter in taken))
        )
        assert words <= known, name


@pytest.mark.parametrize(
    ("command", "declared", "python_alone"),
    [
        ("screen", ScreenArguments, {"progress"}),
        ("verify", Verifying, set()),
        ("registry", Questioned, {"since"}),
        ("race", Racing, {"demo", "quiet"}),
        ("tokens", AnswerTokens, set()),
        ("embed", Embedding, set()),
        ("audit", Auditing, {"details", "seed", "short"}),
        ("calibrate", Calibrating, {"seed"}),
        ("compare", Comparing, set()),
        ("law", Law, {"batch", "quiet"}),
        ("sublayers", Sublayers, {"batch", "quiet", "model"}),
        ("condensation", Condensation, {"batch", "quiet"}),
        ("clusters", Clusters, {"batch", "quiet"}),
    ],
)
def test_what_a_command_takes_is_declared_once(command, declared, python_alone):
    """The function's parameters and their help are those of the command's arguments."""
    is_measure = command in MEASURES
    parser = parser_of("inspect" if is_measure else command)[0]
    actions = {action.dest: action for action in parser._actions}
    function = getattr(lmeval_dispersion, command)
    signature = inspect.signature(function)
    assert {*signature.parameters} == {field.name for field in dataclasses.fields(declared)}
    text = inspect.getdoc(function)
    for name, parameter in signature.parameters.items():
        assert f"\n    {name}: " in text
        if name in python_alone:
            continue
        action = actions[name]
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            # By position on both sides, but for what a command names by an option.
            assert not action.option_strings or action.required
            continue
        assert "default:" in action.help or action.nargs == 0
        if is_measure:  # its function has the default, as measures differ
            assert action.default is None
            continue
        default = action.default
        assert parameter.default == (tuple(default) if isinstance(default, list) else default)


def test_a_name_without_its_library_says_what_to_install():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'pandas'))); import lmeval_dispersion\n"
        "for name in ('law', 'capture', 'DispersionTrainer', 'losses'):\n"
        "    try:\n"
        "        getattr(lmeval_dispersion, name)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
        "for call in (lmeval_dispersion.race,):\n"
        "    try:\n"
        "        call(['x'], tasks='gsm8k')\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
        "from lmeval_dispersion import law"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "law",
        "capture",
        "DispersionTrainer",
        "losses",
        "a",
    ]
    assert all(line.endswith("run: pip install 'lmeval-dispersion[models]'") for line in lines)
    assert done.stderr.splitlines()[-1].endswith(lines[0])


# --- modules without a public name -------------------------------------------------------------------------

PRIVATE = "modules are private"


def packages():
    """Both packages and every room in them; what the screener says holds for its own rooms too."""
    rooms = [f"lmeval_dispersion.{path.parent.name}" for path in ROOT.glob("*/__init__.py")]
    return sorted(["lmeval_dispersion", "lmeval_screener", *rooms])


@pytest.mark.parametrize("name", packages())
def test_a_module_is_public_begins_with_an_underscore_or_its_package_says_that_it_is_private(name):
    """Public: `losses`. The others may be moved without notice."""
    package = importlib.import_module(name)
    public = {"lmeval_dispersion.training.losses"}
    unmarked = [
        f"{name}.{path.stem}"
        for path in Path(str(package.__file__)).parent.glob("*.py")
        if not path.stem.startswith("_") and f"{name}.{path.stem}" not in public
    ]
    assert not unmarked or PRIVATE in " ".join((package.__doc__ or "").split()), (
        f"{', '.join(unmarked)}: begin the name with an underscore, or let the docstring of {name} say which "
        f"names are public and {PRIVATE!r}"
    )
