"""Models of an MLflow registry: a real server, whose models lie in S3."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import warnings
from types import SimpleNamespace

import pytest
from faulty_proxy import FaultyProxy
from hub_client import unread, whole_gap
from lmeval_screener import screen
from lmeval_screener.checkpoints.snapshot import FileEntry, LocalSnapshot
from lmeval_screener.weights.projection import no_weights_error
from storages import expand, process

from lmeval_dispersion.installation import data_folder

DEMO = data_folder("demo")


@pytest.fixture(scope="module")
def registry(s3_server, tmp_path_factory):
    """A server with a model of two versions; the store of their files behind a proxy that counts."""
    pytest.importorskip(
        "mlflow.server", reason="the test needs MLflow's server, not only its client"
    )
    folder = tmp_path_factory.mktemp("mlflow")
    with FaultyProxy(s3_server.port) as proxy, pytest.MonkeyPatch.context() as patch:
        s3_server.use(patch, proxy.endpoint)
        settings = {
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--backend-store-uri", f"sqlite:///{folder}/registry.db", "--workers", "1"]
        command += ["--default-artifact-root", "s3://box/mlflow", "--no-serve-artifacts"]
        env = {**os.environ, **settings}
        with process(lambda port: [*command, "--port", str(port)], env=env, cwd=folder) as port:
            patch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from mlflow import MlflowClient

                client = MlflowClient()
                client.create_registered_model("sums")
                for number, name in ((1, "sums-10"), (2, "sums-80")):
                    place = s3_server.put(DEMO / name, f"mlflow/{number}/artifacts/plain")
                    client.create_model_version("sums", place, await_creation_for=0)
                client.set_registered_model_alias("sums", "champion", "1")
                client.transition_model_version_stage("sums", "1", "Production")
            yield proxy


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_versions_of_a_real_registry(registry, tmp_path):
    """Names, stages and aliases; every version is read by ranges; what is not there is named."""
    for text, versions in (
        ("models:/sums", "2"),
        ("models:/sums/latest", "2"),
        ("models:/sums/Production", "1"),
        ("models:/sums@champion", "1"),
        ("models:/sums/1", "1"),
        ("models:/sums/*", "12"),
    ):
        assert expand(text, tmp_path)[0] == [f"models:/sums/{version}" for version in versions]
    registry.requests.clear()
    result = screen(["models:/sums/*"])
    assert not result.failed
    first, second = sorted(result.checkpoints, key=lambda c: c.repo)
    assert (first.repo, second.repo) == ("models:/sums/1", "models:/sums/2")
    for c, name in ((first, "sums-10"), (second, "sums-80")):
        assert c.gaps["cosine"].mean == pytest.approx(whole_gap(DEMO / name, c), abs=1e-6)
    weights = [r for r in registry.requests if r.path.endswith(".safetensors")]
    assert weights
    assert all("range" in r.headers for r in weights)
    for text, says in (
        ("models:/sums/7", "version=7"),
        ("models:/sums@nobody", "nobody"),
        ("models:/sums/Staging", "none that is ready in the stage Staging"),
        ("models:/nothing/*", "no version of the model nothing"),
    ):
        failed = unread(text, "RepoNotFound", says)
        assert "MLFLOW_TRACKING_URI" in failed.message


@pytest.fixture
def version_at(monkeypatch):
    """Has the registry say where the files of all versions lie."""

    def put(place):
        client = SimpleNamespace(get_model_version_download_uri=lambda name, version: str(place))
        monkeypatch.setattr("lmeval_screener.checkpoints.mlflow_models._client", lambda: client)

    return put


def test_a_version_as_the_flavour_of_transformers_saves_it_and_a_plain_one(version_at, tmp_path):
    shutil.copytree(
        DEMO / "sums-80", tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*")
    )
    (tmp_path / "components" / "tokenizer").mkdir(parents=True)
    shutil.copy(DEMO / "sums-80" / "tokenizer.json", tmp_path / "components" / "tokenizer")
    for place, name in ((tmp_path, "sums-80"), (DEMO / "sums-10", "sums-10")):
        version_at(place)
        (found,) = screen(["models:/sums/1"]).checkpoints
        assert found.repo == "models:/sums/1"
        assert found.gaps["cosine"].mean == pytest.approx(whole_gap(DEMO / name, found), abs=1e-6)


@pytest.mark.parametrize(
    ("place", "code", "says"),
    [
        ("mlflow-artifacts:/1/models/m-1/artifacts", "RangeNotSupported", "--no-serve-artifacts"),
        ("models:/m-0123", "BadName", "mlflow artifacts download"),
        ("http://169.254.169.254/latest", "BadName", "link-local network, and you did not name it"),
        ("http://10.1.2.3/models/1", "BadName", "private network, and you did not name it"),
        ("sftp://100.100.100.200/models/1", "BadName", "private network, and you did not name it"),
    ],
)
def test_what_cannot_be_read_by_ranges_is_never_downloaded(version_at, place, code, says):
    version_at(place)
    unread("models:/sums/1", code, says)


def test_a_server_that_is_not_there_is_named_at_once(monkeypatch):
    pytest.importorskip("mlflow")
    server = "http://user:secret@127.0.0.1:9"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    failed = unread("models:/sums/*", "Unreachable", server.replace("user:secret@", ""))
    for said in ("refused", "MLFLOW_TRACKING_URI"):
        assert said in failed.message
    assert "secret" not in failed.message


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    unread("models:/sums", "MissingExtra", "lmeval-dispersion[mlflow]")


def test_a_model_in_a_subfolder_is_downloaded_by_mlflows_own_command(tmp_path):
    files = {"sub/model.safetensors": FileEntry("sub/model.safetensors", 8, None)}
    stored = LocalSnapshot("models:/sums/2", tmp_path, files)
    error = asyncio.run(no_weights_error(stored))
    assert "mlflow artifacts download -u models:/sums/2" in str(error)
    assert "such as sub" in str(error)
