"""The screener does with its base install, and `--help` without any library at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lmeval_dispersion.cli import main

HEAVY = ("torch", "transformers", "lm_eval", "datasets", "sklearn", "scipy", "pandas", "pyarrow")
HEAVY += ("obstore", "botocore", "mlflow")


def loaded_after(code: str) -> set[str]:
    """Top-level names of the modules that a fresh process has after running ``code``."""
    script = (
        f"{code}\nimport sys\nprint('\\n'.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "from lmeval_screener import screen, Result",
        "import lmeval_screener.cli, lmeval_screener.screening, lmeval_screener.result",
        "import lmeval_dispersion, lmeval_dispersion.geometry, lmeval_dispersion.cli",
    ],
)
def test_the_screener_loads_nothing_beyond_its_base_install(code):
    assert not loaded_after(code) & set(HEAVY)


def test_help_loads_no_library_at_all():
    code = """
import contextlib, io
from lmeval_screener.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main(["--help"])
"""
    assert not loaded_after(code) & {
        *HEAVY,
        "numpy",
        "pandas",
        "aiohttp",
        "huggingface_hub",
        "rich",
    }


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_the_demo_reports_without_the_libraries_of_pages_and_frames(form):
    code = f"""
import contextlib, io
from lmeval_screener.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["--demo", "--format", "{form}"]) == 0
"""
    assert not loaded_after(code) & {*HEAVY, "pandas", "vl_convert", "aiohttp"}


@pytest.mark.parametrize(
    ("library", "extra"),
    [("pandas", "audit"), ("sklearn", "audit"), ("vl_convert", "html"), ("torch", "models")],
)
def test_a_library_that_is_met_on_the_way_is_named_with_the_part_that_brings_it(
    library, extra, monkeypatch, capsys
):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {library!r}", name=library)

    monkeypatch.setattr("lmeval_dispersion.cli.importlib.import_module", missing)
    assert main(["watch", "a"]) == 1
    assert f"needs {library}" in (shown := capsys.readouterr().err)
    assert f"pip install 'lmeval-dispersion[{extra}]'" in shown


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("inspect law", "models"),
        ("train", "models"),
        ("run", "models"),
        ("embed", "models"),
        ("audit", "audit"),
    ],
)
def test_a_command_names_the_part_that_it_needs_in_the_end(command, extra, monkeypatch, capsys):
    """In a base install; today's first missing library would be that of another part."""
    monkeypatch.setattr("lmeval_dispersion.errors.importlib.util.find_spec", lambda name: None)
    assert main([*command.split(), "a"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"dispersion {command}: `dispersion {command}` needs ")
    assert shown.endswith(f"run: pip install 'lmeval-dispersion[{extra}]'\n")
    assert shown.count("\n") == 1


def test_a_screening_imports_no_more_of_our_files_than_it_needs():
    code = """
import contextlib, io
from lmeval_screener.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["--demo", "-q"]) == 0
"""
    script = f"{code}\nimport sys\nprint(*(name for name in sys.modules if name.startswith('lmeval_')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    files = set(done.stdout.split())
    assert not {f"lmeval_screener.{name}" for name in ("charts", "shortlist", "ray_reader")} & files
    assert len(files) <= 40
