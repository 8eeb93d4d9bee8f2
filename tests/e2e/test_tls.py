"""The command over https, as the real Hub speaks: certificates are checked on every connection."""

from __future__ import annotations

import json

import pytest
from certificates import make_certificate
from hub_faults import truncated
from hub_server import HubServer
from lmeval_screener import screen
from lmeval_screener.checkpoints import http
from lmeval_screener.screening.run import TIMEOUT

from lmeval_dispersion.installation import data_folder


@pytest.fixture
def hub(tmp_path):
    with HubServer(tls=make_certificate(tmp_path / "server.pem")) as server:
        server.add("org/m", data_folder("demo") / "sums-10")
        yield server


@pytest.fixture
def screened(hub, tmp_path, in_process, monkeypatch):
    """The command's JSON where these variables name the certificates."""
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setenv(TIMEOUT, "20")

    def run(**certificates):
        http._tls_context.cache_clear()
        for name, place in certificates.items():
            monkeypatch.setenv(name, str(tmp_path / place))
        words = ("org/m", "--format", "json")
        return json.loads(in_process(*words, endpoint=hub.endpoint).stdout)

    yield run
    http._tls_context.cache_clear()


def test_rows_come_over_https_with_a_certificate_that_is_trusted(hub, screened):
    hub.fault("cdn", truncated(100), times=3)
    result = screened(REQUESTS_CA_BUNDLE="server.pem")
    assert result["failed"] == []
    folder = screen([str(data_folder("demo") / "sums-10")]).checkpoints[0]
    assert result["checkpoints"][0]["gap"]["cosine"]["mean"] == folder.gaps["cosine"].mean
    assert hub.endpoint.startswith("https://")
    assert len(hub.seen("cdn")) > 5
    assert hub.connections[1] < len(hub.seen("cdn"))
    assert not any("authorization" in request.headers for request in hub.seen("cdn"))


def test_a_certificate_that_is_not_trusted_is_refused_and_a_missing_file_named(hub, screened):
    for certificates, says in (
        ({}, "REQUESTS_CA_BUNDLE"),
        ({"SSL_CERT_FILE": "none.pem"}, "none.pem"),
    ):
        (failed,) = screened(**certificates)["failed"]
        assert failed["error"] == "Unreachable"
        assert says in failed["message"]
        assert "SSL_CERT_FILE" in failed["message"]
    assert hub.requests == []
