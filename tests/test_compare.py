"""``dispersion compare`` over stores of harness runs: every format says the same."""

from __future__ import annotations

import io
import json

import pandas as pd
import pytest
from synthetic import planted_store

from lmeval_dispersion.cli import main


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    for name, effect in (("base", 0.5), ("tuned", 0.8)):
        planted_store(folder / name, n=300, effect=effect, manifest={"model": f"synthetic/{name}"})
    return [str(folder / "base"), str(folder / "tuned")]


def test_stores_go_to_the_audit_in_every_format(stores, capsys, tmp_path):
    assert main(["compare", *stores, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    slices = found["others"][0]["slices"]
    assert slices[0]["documents"] == 300
    assert slices[0]["dispersion_difference"] > 0
    assert main(["compare", *stores, "--format", "csv"]) == 0
    rows = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert rows["slice"].tolist() == [row["slice"] for row in slices]
    assert rows["dispersion_difference"].tolist() == pytest.approx(
        [row["dispersion_difference"] for row in slices], rel=1e-6
    )
    assert main(["compare", *stores]) == 0
    assert "300 shared documents" in capsys.readouterr().out
    assert main(["compare", *stores, "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "synthetic/tuned" in page
    assert f"{slices[0]['dispersion_difference']:+.4f}" in page.replace("−", "-")


def test_layers_and_slices_are_passed_on(stores, capsys):
    assert main(["compare", *stores, "--slice", "category", "--format", "csv"]) == 0
    rows = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert rows["slice"].tolist() == ["all documents", "category 0", "category 1"]
    assert main(["compare", *stores, "--layer", "layer.9"]) == 2
    assert "layer.9" in capsys.readouterr().err
