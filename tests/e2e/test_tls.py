"""The command over https, as the real Hub speaks: certificates are checked on every connection."""

from __future__ import annotations

import json

import pytest
from certificates import make_certificate
from hub_faults import status, truncated
from hub_server import HubServer
from lmeval_screener import screen
from lmeval_screener.checkpoints import http

from lmeval_dispersion.paths import data_folder


@pytest.fixture
def certificate(tmp_path):
    return make_certificate(tmp_path / "tls")


@pytest.fixture
def hub(certificate):
    with HubServer(tls=certificate.context) as server:
        server.add("org/m", data_folder("demo") / "sums-10")
        yield server


@pytest.fixture
def screened(hub, in_process, monkeypatch):
    """The command's JSON where these variables name the certificates."""
    http._tls_context.cache_clear()
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", hub.token)

    def run(**certificates):
        for name, place in certificates.items():
            monkeypatch.setenv(name, str(place))
        words = ("org/m", "--format", "json", "--timeout", "20")
        return json.loads(in_process(*words, endpoint=hub.endpoint).stdout)

    yield run
    http._tls_context.cache_clear()


def test_rows_come_over_https_with_a_certificate_that_is_trusted(hub, certificate, screened):
    hub.fault("cdn", truncated(100), times=3)
    result = screened(REQUESTS_CA_BUNDLE=certificate.issuer)
    assert result["failed"] == []
    folder = screen([str(data_folder("demo") / "sums-10")]).checkpoints[0]
    assert result["checkpoints"][0]["gap"]["cosine"]["mean"] == folder.gaps["cosine"].mean
    assert hub.endpoint.startswith("https://")
    assert len(hub.seen("cdn")) > 5
    assert hub.connections[1] < len(hub.seen("cdn"))
    assert not any("authorization" in request.headers for request in hub.seen("cdn"))


def test_a_certificate_that_is_not_trusted_is_refused(hub, screened):
    result = screened()
    assert result["checkpoints"] == []
    assert result["failed"][0]["error"] == "Unreachable"
    assert "SSL_CERT_FILE or REQUESTS_CA_BUNDLE" in result["failed"][0]["message"]
    assert hub.requests == []


def test_a_file_of_certificates_that_cannot_be_read_is_named(screened, tmp_path):
    (failed,) = screened(SSL_CERT_FILE=tmp_path / "none.pem")["failed"]
    assert failed["error"] == "Unreachable"
    assert "none.pem" in failed["message"]
    assert "SSL_CERT_FILE" in failed["message"]


def test_a_redirect_from_https_to_http_is_refused(hub, certificate, screened):
    """The address that it leads to is never asked."""
    with HubServer() as plain:
        hub.fault("resolve", status(302, {"Location": f"{plain.endpoint}/x"}))
        result = screened(SSL_CERT_FILE=certificate.issuer)
        assert result["failed"][0]["error"] == "BadResponse"
        assert "from https to http" in result["failed"][0]["message"]
        assert plain.requests == []
