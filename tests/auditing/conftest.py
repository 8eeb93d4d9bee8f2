"""Runs that several tests of the audit read and none changes; the protocol has tests of its own."""

import pytest
from synthetic import planted_store

from lmeval_dispersion.auditing.run import read_run


@pytest.fixture(scope="module", autouse=True)
def _few_splits(two_splits):
    """In every audit here."""


@pytest.fixture(scope="session")
def planted(tmp_path_factory):
    """A run whose right answers are more dispersed."""
    return read_run(planted_store(tmp_path_factory.mktemp("planted") / "s", effect=0.5))


@pytest.fixture(scope="session")
def noise(tmp_path_factory):
    """A run whose right answers have nothing to do with the vectors."""
    return read_run(planted_store(tmp_path_factory.mktemp("noise") / "s", effect=0.0, seed=1))
