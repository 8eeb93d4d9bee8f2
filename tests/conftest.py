"""Fixtures that several areas share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
from command import in_process  # noqa: F401
from hub_server import HubServer

# The tests run side by side, one worker a core, and threads of torch and BLAS would wait for each other at
# full load. Said before either is imported, and handed down to the commands that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without torch, what needs none is tested: the screener, the registry, the audit, stores, reports. Left out
# are models, training and the plugin, and what goes through every command and name of the package.
if importlib.util.find_spec("torch") is None:
    collect_ignore = [
        *("harness", "laboratory", "model", "training", "validity", "watching"),
        *("planted_law.py", "tiny_decoders.py", "tiny_models.py"),
        *("test_demo_family.py", "test_docs.py", "test_guides.py", "test_manners.py", "test_public_names.py"),
        *(f"e2e/test_{name}.py" for name in ("audit_commands", "examples", "laboratory", "train_command")),
        *(f"screener/weights/test_{name}.py" for name in ("adapters", "archive_checkpoints", "float8")),
        *("screener/weights/test_torch_archive.py", "screener/test_what_g_reads.py"),
    ]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A loopback Hub without latency; see `hub_server.HubServer`."""
    with HubServer() as server:
        yield server
