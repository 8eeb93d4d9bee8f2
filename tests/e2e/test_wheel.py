"""The published files: two builds are one, and the wheel works by itself, outside of the checkout.

`scripts/try_wheel.sh` installs it with uv and pipx as well, which needs a package index.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, folder: Path, **environment: str) -> str:
    """Standard output of a command that has to succeed."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(source: Path, target: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution of a folder of sources."""
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", target, source)
    run(*build, folder=target.parent, SOURCE_DATE_EPOCH="1700000000")
    (wheel,), (sources,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, sources


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    return built(ROOT, folder / "dist")


@pytest.fixture(scope="module")
def site(distributions, tmp_path_factory):
    """The wheel, unpacked as an installer does."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(distributions[0]).extractall(folder)
    return folder


@pytest.mark.slow
def test_a_build_of_the_published_sources_gives_the_same_bytes(distributions, tmp_path):
    with tarfile.open(distributions[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (sources,) = tmp_path.iterdir()
    for file in sources.rglob("*"):
        os.utime(file, (1_600_000_000, 1_600_000_000))
    again = built(sources, tmp_path / "dist")
    assert [file.name for file in again] == [file.name for file in distributions]
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in distributions]


def test_the_wheel_holds_what_it_needs_and_nothing_else(site, distributions):
    names = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    tops = {name.split("/")[0] for name in names}
    assert {re.sub(r"-\d[\w.]*(?=\.dist)", "", top) for top in tops} == {
        "lmeval_dispersion",
        "lmeval_screener",
        "lmeval_dispersion.dist-info",
    }
    data = site / "lmeval_dispersion" / "data"
    for folder in ("token_sets", "task_configs"):
        kept = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.yaml")}
        assert kept <= {path.relative_to(data / folder) for path in (data / folder).rglob("*.yaml")}
    # Every model whole: a checkpoint that lacks a shard is refused, for no loader takes it.
    assert len(list((data / "demo").glob("*/model-0000?-of-00002.safetensors"))) == 22
    assert distributions[0].stat().st_size < 12_000_000
    assert next(site.glob("*/METADATA")).read_text("utf-8").startswith("Metadata-Version: 2.4\n")


@pytest.mark.slow
def test_a_users_program_with_every_public_name_passes_mypys_strict_mode(site, tmp_path):
    program = tmp_path / "program.py"
    names = {
        package: importlib.import_module(package).__all__
        for package in ("lmeval_dispersion", "lmeval_screener")
    }
    imports = [f"from {package} import {name}" for package, of in names.items() for name in of]
    typed = """
from torch import nn
layers: list[str] = open_store("run").layers
best: list[str] = [row.repo for row in screen(["a", "b"]).checkpoints]
logs: dict[str, float] = RaceCallback("a").ask(nn.Linear(1, 1), 1)
g: float = dispersion([[0.0, 1.0], [1.0, 0.0]])
screen(["a"], shortlst=3)  # type: ignore[call-arg]
"""
    program.write_text("\n".join(imports) + typed)
    words = (
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
        "--cache-dir",
        tmp_path / "cache",
    )
    said = run(sys.executable, "-m", "mypy", *words, program, folder=tmp_path, MYPYPATH=str(site))
    assert said.startswith("Success")
    assert {"open_store", "RaceCallback", "screen"} <= set(names["lmeval_dispersion"])
    for package in names:
        assert (
            site / package / "py.typed"
        ).is_file()  # without it an installed package has no types


def test_the_demo_runs_from_the_wheel_alone(site, tmp_path):
    (wheel,) = metadata.distributions(path=[str(site)])
    (command,) = wheel.entry_points.select(name="screen-checkpoints")
    code = (
        f"import sys, {command.module} as cli; print(cli.__file__); sys.exit(cli.{command.attr}())"
    )
    words = (sys.executable, "-c", code, "--demo", "--quiet")
    place, answer = run(*words, folder=tmp_path, PYTHONPATH=str(site)).split("\n", 1)
    assert place.startswith(str(site))
    assert answer.startswith("Evaluate first: sums-80")
