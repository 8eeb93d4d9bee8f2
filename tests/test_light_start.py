"""The screener does with its base install, and `--help` without any library at all."""

import subprocess
import sys

import pytest

from lmeval_dispersion.cli import main
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.options import exit_code_of

HEAVY = {"torch", "transformers", "lm_eval", "datasets", "sklearn", "scipy", "pandas", "pyarrow"}
HEAVY |= {"obstore", "botocore", "mlflow", "vl_convert"}
LIBRARIES = {
    "numpy",
    "yaml",
    "aiohttp",
    "huggingface_hub",
    "rich",
    "jinja2",
    "asyncio",
    "email",
    "yarl",
}
#: Those that only speak with servers, or are dear and needed for a form or a page alone.
ELSEWHERE = {
    "aiohttp",
    "yarl",
    "requests",
    "httpx",
    "asyncio",
    "ssl",
    "socket",
    "http",
    "urllib.request",
}
ELSEWHERE |= {"email", "importlib.metadata", "csv", "statistics"}
COMMAND = """
import contextlib, io
from {package}.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    assert main({words!r}) == 0
"""
HELP_OF_ALL = """
import contextlib, io
from lmeval_dispersion.cli import COMMANDS, main
for name in COMMANDS:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([name, "--help"])
assert name == "inspect"
"""
FOLDERS = [str(data_folder("demo") / name) for name in ("sums-80", "sums-45")]


def screening(*words):
    return COMMAND.format(package="lmeval_screener", words=words)


def loaded_after(code):
    """Names of the modules that a fresh process has after running ``code``."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("from lmeval_screener import screen, Result", HEAVY),
        (
            "import lmeval_screener.cli, lmeval_screener.screening.run, lmeval_screener.result.result",
            HEAVY,
        ),
        ("import lmeval_dispersion.geometry, lmeval_dispersion.cli", HEAVY),
        (
            "import lmeval_dispersion as d; d.__all__, dir(d)",
            {*HEAVY, *LIBRARIES, "lmeval_screener"},
        ),
        (screening("--help"), HEAVY | LIBRARIES),
        (HELP_OF_ALL, HEAVY | LIBRARIES),
        (screening(*FOLDERS), HEAVY | ELSEWHERE),
        (
            COMMAND.format(package="lmeval_dispersion", words=["audit", "--demo"]),
            {"torch", "transformers", "lm_eval", "datasets"},
        ),
        (
            "import os; os.environ['HF_HOME'] = 'nowhere'\n"
            "from lmeval_screener.checkpoints.hub import Hub; Hub().has_token()",
            {"huggingface_hub.errors", "httpx", "yarl"},
        ),
        *(
            (screening("--demo", "--format", form), HEAVY | ELSEWHERE - others)
            for form, others in (
                ("table", set()),
                ("markdown", {"importlib.metadata", "email", "csv", "socket"}),
                ("csv", {"csv", "importlib.metadata", "email", "socket"}),
                ("json", set()),
            )
        ),
    ],
)
def test_no_more_libraries_are_loaded_than_needed(code, unwanted):
    assert not loaded_after(code) & unwanted


def test_a_screening_imports_no_more_of_our_files_than_it_needs():
    loaded = loaded_after(screening("--demo", "-q"))
    files = {name for name in loaded if name.startswith("lmeval_")}
    later = ("result.charts", "shortlist")
    assert not {f"lmeval_screener.{name}" for name in later} & files
    assert len(files) <= 66


@pytest.mark.parametrize(
    ("library", "extra"),
    [
        *(("pandas", "audit"), ("sklearn", "audit"), ("vl_convert", "html"), ("torch", "models")),
        *(("peft", "models"), ("ray", "ray")),
    ],
)
def test_a_library_that_is_met_on_the_way_is_named_with_the_part_that_brings_it(
    library, extra, monkeypatch, capsys
):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {library!r}", name=library)

    monkeypatch.setattr("lmeval_dispersion.cli.importlib.import_module", missing)
    assert main(["inspect", "a"]) == 1
    assert f"needs {library}" in (shown := capsys.readouterr().err)
    assert f"pip install 'lmeval-dispersion[{extra}]'" in shown


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            ModuleNotFoundError("No module named 'vllm'", name="vllm.lora"),
            "needs vllm, which is not part of lmeval-dispersion; run: pip install vllm",
        ),
        (ModuleNotFoundError("needs `mamba_ssm`.  run\npip"), "needs `mamba_ssm`. run pip"),
    ],
)
def test_a_library_that_no_extra_brings_is_not_said_to_be_in_one(error, sentence, capsys):
    def missing():
        raise error

    assert exit_code_of("dispersion race", missing, []) == 1
    assert capsys.readouterr().err == f"dispersion race: {sentence}\n"


def test_a_folder_that_was_deleted_meanwhile_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main(["screen", "--demo", "-o", "page.csv"]) == 1
    monkeypatch.undo()
    assert "the current folder was deleted; change to one that exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("inspect", "models"),
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
