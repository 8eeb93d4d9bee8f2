"""The public surface: the names, where they come from, and which modules are nobody's to import."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lmeval_dispersion

ROOT = Path(lmeval_dispersion.__file__).parent
EXAMPLES = ROOT.parent / "examples"


def type_checking_names() -> set[str]:
    """The names that the package's ``if TYPE_CHECKING`` block gives to type checkers."""
    (block,) = [
        node for node in ast.parse((ROOT / "__init__.py").read_text("utf-8")).body if isinstance(node, ast.If)
    ]
    return {
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_exported_names_are_the_same_everywhere():
    assert lmeval_dispersion.__all__ == sorted(lmeval_dispersion.__all__)
    assert set(lmeval_dispersion.__all__) == type_checking_names() == set(lmeval_dispersion._WHERE)
    assert set(lmeval_dispersion.__all__) <= set(dir(lmeval_dispersion))


@pytest.mark.parametrize("name", lmeval_dispersion.__all__)
def test_every_name_is_there_and_says_what_it_is(name):
    value = getattr(lmeval_dispersion, name)
    assert inspect.getdoc(value)
    module, attribute = lmeval_dispersion._WHERE[name]
    found = importlib.import_module(module)
    assert value is (getattr(found, attribute) if attribute else found)


def test_public_names_are_no_rooms():
    """A name shared with a package inside would be the package once anything imported that."""
    rooms = {path.stem for path in ROOT.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert not rooms & set(lmeval_dispersion.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'dispersal'"):
        lmeval_dispersion.dispersal  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("lmeval_dispersion.dispersal")


def test_importing_the_package_loads_the_standard_library_only():
    code = (
        "import sys, lmeval_dispersion; lmeval_dispersion.__all__, dir(lmeval_dispersion)\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(tops & {'numpy', 'yaml', 'rich', 'torch', 'aiohttp', 'lmeval_screener'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_an_audit_by_its_public_name():
    report = lmeval_dispersion.audit_run(EXAMPLES / "mmlu_before", seed=1)
    assert report["format"] == "dispersion-audit/3"
    assert report["seed"] == 1
    assert report["run"]["documents"] == len(lmeval_dispersion.open_store(EXAMPLES / "mmlu_before").documents)


# --- modules without a public name -------------------------------------------------------------------------

PRIVATE = "Its modules are private"


def packages() -> list[str]:
    """Both packages and every room in them; what the screener says holds for its own rooms too."""
    rooms = [f"lmeval_dispersion.{path.parent.name}" for path in ROOT.glob("*/__init__.py")]
    return sorted(["lmeval_dispersion", "lmeval_screener", *rooms])


@pytest.mark.parametrize("name", packages())
def test_a_module_is_public_begins_with_an_underscore_or_its_package_says_that_it_is_private(name):
    """Public: a module that `_WHERE` names. The others may be moved without notice."""
    package = importlib.import_module(name)
    public = {module for module, _ in lmeval_dispersion._WHERE.values()}
    unmarked = [
        f"{name}.{path.stem}"
        for path in Path(str(package.__file__)).parent.glob("*.py")
        if not path.stem.startswith("_") and f"{name}.{path.stem}" not in public
    ]
    assert not unmarked or PRIVATE in " ".join((package.__doc__ or "").split()), (
        f"{', '.join(unmarked)}: begin the name with an underscore, or let the docstring of {name} say which "
        f"names are public and {PRIVATE!r}"
    )
