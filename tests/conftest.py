"""Fixtures that several areas share."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command import in_process  # noqa: F401
from hub_server import HubServer
from nights import night  # noqa: F401

# The tests run side by side on all cores, and threads of torch and BLAS would wait for each other at full
# load. Said before either is imported, and handed down to the commands that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes depends on what else the machine does.
if importlib.util.find_spec("hypothesis") is not None:  # the light tests may lack it
    from hypothesis import settings

    settings.register_profile("any-machine", deadline=None)
    settings.load_profile("any-machine")

# They have no doctests, and two of them that are named on one command line have one module's name.
collect_ignore_glob = ["*/conftest.py"]

# Without torch, what needs none is tested. Left out: models, training, the plugin, and what goes through
# every command and name of the package.
if importlib.util.find_spec("torch") is None:
    collect_ignore = [
        *("harness", "laboratory", "model", "racing/live", "training", "validity"),
        *(() if importlib.util.find_spec("pandas") else ("auditing",)),
        *(
            "test_demo_family.py",
            "test_docs.py",
            "test_guides.py",
            "test_manners.py",
            "test_public_names.py",
        ),
        *("test_errors.py", "test_light_start.py"),
        *(f"e2e/test_{name}.py" for name in ("audit_commands", "default_outputs", "laboratory")),
    ]

    def pytest_addoption(parser: pytest.Parser) -> None:
        """Settings of plugins that need not be installed."""
        if importlib.util.find_spec("pytest_timeout") is None:
            parser.addini("timeout", "seconds for each test, by pytest-timeout")

    def pytest_configure(config: pytest.Config) -> None:
        """Markers likewise."""
        config.addinivalue_line("markers", "timeout(seconds): by pytest-timeout")

    def skip_what_needs_more(report: Any, path: Path) -> Any:
        """A failure that a missing library explains, as skipped; what it was."""
        text = f"{report.longrepr}\n{report.caplog}{report.capstderr}" if report.failed else ""
        needs = re.search(r"No module named .*|needs .* not installed.*", text)
        if needs:
            report.outcome, report.longrepr = "skipped", (str(path), 0, f"Skipped: {needs[0]}")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
        """Skip a file that imports a library that is not installed."""
        return skip_what_needs_more((yield), collector.path)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
        """Skip a test that needs one."""
        return skip_what_needs_more((yield), item.path)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported for all tests stays: garbage is not looked for while torch and the rest come in."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# With few tests and much to do: a worker that begins one last works alone at the end.
FIRST = (
    "test_race",
    "test_loras",
    "test_guides",
    "test_training_docs",
    "test_hub_study",
)
FIRST += ("test_wheel", "test_recording", "test_trainer", "test_siblings")
FIRST += ("test_next_lm_eval", "test_losses", "test_no_trace", "test_race_callback")
FIRST += ("test_screener_report", "test_light_start")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; pytest-xdist keeps the order with --no-loadscope-reorder."""
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="module", autouse=True)
def _long_lived_objects_are_not_looked_through_again():
    """A race collects garbage at each turn, which takes a second where torch and lm-eval are imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def two_splits():
    """The paper's protocol with two splits of ten: its forests take most of an audit's time."""
    from lmeval_dispersion.auditing.mixtures.protocol import paper_protocol

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lmeval_dispersion.auditing.report.paper_protocol", partial(paper_protocol, seeds=2)
        )
        yield


@pytest.fixture
def hub():
    """A loopback Hub without latency; see `hub_server.HubServer`."""
    with HubServer() as server:
        yield server
