"""Runs that several tests of the audit read and none changes; the paper's protocol with two splits of ten."""

from functools import partial

import pytest
from synthetic import planted_store

from lmeval_dispersion.auditing.protocol import paper_protocol
from lmeval_dispersion.auditing.run import read_run


@pytest.fixture(scope="module", autouse=True)
def two_splits():
    """Forests take most of the time of an audit, and the protocol has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmeval_dispersion.auditing.report.paper_protocol", partial(paper_protocol, seeds=2))
        yield


@pytest.fixture(scope="session")
def planted(tmp_path_factory):
    """A run whose right answers are more dispersed."""
    return read_run(planted_store(tmp_path_factory.mktemp("planted") / "s", effect=0.5))


@pytest.fixture(scope="session")
def noise(tmp_path_factory):
    """A run whose right answers have nothing to do with the vectors."""
    return read_run(planted_store(tmp_path_factory.mktemp("noise") / "s", effect=0.0, seed=1))
