"""The command over https, as the real Hub speaks: certificates are checked on every connection."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from certificates import make_certificate
from checkpoints import write_qwen_7b
from hub_faults import status, truncated
from hub_server import HubServer
from lmeval_screener.checkpoints import http
from lmeval_screener.tokens import load_token_set, resolve
from lmeval_screener.tokens.vocabulary import Vocabulary

TOKENIZER = Path(__file__).parent.parent / "data" / "tokenizers" / "qwen2.5.json"


@pytest.fixture
def certificate(tmp_path):
    return make_certificate(tmp_path / "tls")


@pytest.fixture
def hub(certificate, tmp_path):
    vocabulary = Vocabulary.from_file("tokenizer.json", TOKENIZER.read_bytes())
    found = resolve(load_token_set("math", "domain"), load_token_set("reference", "reference"), vocabulary)
    draw = np.random.default_rng(0)
    rows = {row: draw.normal(size=(1, 3584)) for row in (*found.domain_ids, *found.reference_ids)}
    folder = write_qwen_7b(tmp_path / "m", rows=rows)
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    with HubServer(tls=certificate.context) as server:
        server.add("org/m", folder, parameters=7_615_616_512)
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
    hub.fault("cdn", truncated(1000), times=3)
    result = screened(REQUESTS_CA_BUNDLE=certificate.issuer)
    assert result["failed"] == []
    assert result["checkpoints"][0]["tensor"]["shape"] == [152064, 3584]
    assert hub.endpoint.startswith("https://")
    assert len(hub.seen("cdn")) > 90
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
