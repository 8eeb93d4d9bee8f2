"""What identifies a study: content. A changed input makes another study, another name does not."""

from __future__ import annotations

import shutil

import pytest
import tiny_models
import torch

from lmeval_dispersion import condensation
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.analysis import labels, model_settings
from lmeval_dispersion.laboratory.study import StudyRoot
from lmeval_dispersion.model.loading import ModelChoice, load_model

OPTIONS = {"segment": 12, "segments": 10}


@pytest.fixture
def inputs(tmp_path):
    words = [" ".join(f"w{(i * k) % 90}" for i in range(12)) for k in range(1, 20)]
    text = tiny_models.text_file(tmp_path / "text.jsonl", words)
    return tiny_models.saved(tmp_path / "model", tiny_models.llama()), text


@pytest.mark.parametrize(
    ("what", "message"), [("text", "the text {'sha256': '"), ("weights", "the models' files .*'sha256:")]
)
def test_a_changed_input_is_refused_in_its_folder_and_computed_in_another(
    inputs, tmp_path, what, message, capsys
):
    model, text = inputs
    first = condensation(model, text, folder=tmp_path / "study", **OPTIONS)
    kept = condensation(model, text, folder=StudyRoot(tmp_path / "studies"), **OPTIONS)
    # Nothing changed: nothing is computed, so a model that cannot be loaded is no obstacle.
    assert condensation(model, text, folder=tmp_path / "study", **OPTIONS).manifest == first.manifest
    if what == "text":
        text.write_text(text.read_text().replace("w3 ", "w4 "))
    else:
        other = tiny_models.llama()
        with torch.no_grad():
            other.model.layers[1].mlp.down_proj.weight[3, 5] += 0.25
        tiny_models.saved(model, other)
    with pytest.raises(UsageError, match=message + r".*, now .*; pass another folder="):
        condensation(model, text, folder=tmp_path / "study", **OPTIONS)
    again = condensation(model, text, folder=StudyRoot(tmp_path / "studies"), quiet=False, **OPTIONS)
    assert f"the study is kept in {tmp_path / 'studies' / 'condensation-'}" in capsys.readouterr().err
    assert len(list((tmp_path / "studies").iterdir())) == 2
    assert not again.layers["mean"].equals(kept.layers["mean"])
    fresh = condensation(model, text, **OPTIONS)
    assert again.layers["mean"].equals(fresh.layers["mean"])


def test_the_same_content_under_another_name_is_the_same_study(inputs, tmp_path):
    model, text = inputs
    first = condensation(model, text, folder=tmp_path / "study", **OPTIONS)
    shutil.copytree(model, tmp_path / "moved")
    shutil.copy(text, tmp_path / "moved.jsonl")
    again = condensation(tmp_path / "moved", tmp_path / "moved.jsonl", folder=tmp_path / "study", **OPTIONS)
    assert again.manifest == first.manifest
    assert first.manifest["names"] == {"models": [str(model)], "texts": [str(text)]}


def test_models_are_called_by_the_parts_of_their_names_that_differ(inputs, monkeypatch):
    model, _ = inputs
    shutil.copytree(model, model.parent / "after" / "model")
    other = str(model.parent / "after" / "model")
    assert labels([str(model)]) == ["model"]
    assert labels([str(model), other]) == [f"{model.parent.name}/model", "after/model"]
    assert labels(["org/a-7b", ModelChoice("org/a-7b", revision="step1")]) == ["a-7b", "a-7b@step1"]
    adapted = ModelChoice("org/a-7b", adapter="ours/lora", quantize="4bit")
    assert labels([adapted]) == ["a-7b + lora (4bit)"]
    monkeypatch.chdir(model)
    assert labels(["."]) == ["model"]


def test_a_loaded_model_is_its_parameters(inputs):
    model, _ = inputs
    loaded = load_model(model)
    before = model_settings(loaded)
    assert before == model_settings(load_model(model))
    with torch.no_grad():
        loaded.model.model.norm.weight[0] += 0.5
    assert model_settings(loaded)["weights"] != before["weights"]
