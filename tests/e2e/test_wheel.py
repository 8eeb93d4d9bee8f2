"""What is published: two builds are one, and the wheel works by itself, outside of the checkout.

`scripts/try_wheel.sh` installs it with uv and pipx as well, which needs a package index.
"""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
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
    assert [one.name for one in again] == [one.name for one in distributions]
    assert [one.read_bytes() for one in again] == [one.read_bytes() for one in distributions]


def test_the_wheel_holds_what_it_needs_and_nothing_else(site):
    names = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    tops = {name.split("/")[0] for name in names}
    assert {re.sub(r"-[\d.]+\d", "", top) for top in tops} == {
        "lmeval_dispersion",
        "lmeval_screener",
        "lmeval_dispersion.dist-info",
    }
    data = site / "lmeval_dispersion" / "data"
    for folder in ("token_sets", "task_configs"):
        kept = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.yaml")}
        assert kept <= {path.relative_to(data / folder) for path in (data / folder).rglob("*.yaml")}
    # README and tutorials load these models whole; the screener reads the first shard only.
    whole = {path.parent.name for path in (data / "demo").glob("*/model-00002-of-00002.safetensors")}
    assert whole == {"sums-00", "sums-10", "sums-20", "sums-80"}
    assert len(list((data / "demo").glob("*/model-00001-of-00002.safetensors"))) == 11


def test_the_wheel_is_small(distributions):
    assert distributions[0].stat().st_size < 6_000_000


def called(site: Path, name: str, *words: str, folder: Path) -> str:
    """What a console script of the wheel prints, run as an installer would write it."""
    points = configparser.ConfigParser()
    points.read(next(site.glob("*.dist-info/entry_points.txt")), "utf-8")
    module, function = points["console_scripts"][name].split(":")
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv[0] = {name!r}\n"
        f"import {module} as module; assert module.__file__.startswith({str(site)!r}), module.__file__\n"
        f"sys.exit(module.{function}())"
    )
    return run(sys.executable, "-c", code, *words, folder=folder)


def test_the_demo_runs_from_the_wheel_alone(site, tmp_path):
    assert called(site, "screen-checkpoints", "--demo", "--quiet", folder=tmp_path).startswith(
        "Evaluate first: sums-80"
    )
