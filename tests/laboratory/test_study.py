"""Studies: known by the content of their inputs, resumed to the same bits wherever they were stopped."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import weakref
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import tiny_models
import torch

from lmeval_dispersion import clusters, condensation
from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.laboratory import causal_model
from lmeval_dispersion.laboratory.analysis import data_settings, labels, model_settings
from lmeval_dispersion.laboratory.study import Study, StudyRoot, read_study
from lmeval_dispersion.model.loading import LoadedModel, ModelChoice, load_model
from lmeval_dispersion.model.texts import Texts

UNITS = 23


def worked(folder, stop_at=None, done=None):
    """A study whose units keep two arrays; stops in the middle of unit ``stop_at``."""
    study = Study.open(folder, "law", {"seed": 1})

    def do(unit):
        if unit == stop_at:
            raise KeyboardInterrupt
        if done is not None:
            done.append(unit)
        return {"square": np.array(unit**2), "rows": np.full(unit % 3, unit / 7)}

    return study, study.units("squares", UNITS, do)


def test_a_study_stopped_again_and_again_ends_like_one_that_was_not(tmp_path):
    _, expected = worked(tmp_path / "whole")
    done = []
    for stop in (0, 5, 6, 22):
        with pytest.raises(KeyboardInterrupt):
            worked(tmp_path / "stopped", stop, done)
    (tmp_path / "stopped" / "work" / "squares" / ".22.npz.1").write_bytes(b"PK")  # as a kill leaves it
    _, units = worked(tmp_path / "stopped", done=done)
    assert done == list(range(UNITS))  # each once
    assert units.stacked("square").tolist() == [unit**2 for unit in range(UNITS)]
    assert np.array_equal(units.joined("rows"), expected.joined("rows"))


def test_a_folder_with_something_else_is_refused(tmp_path):
    worked(tmp_path / "r")
    for name, file, content in (
        ("mine", "thesis.txt", "x"),
        ("store", "manifest.json", '{"format": "dispersion-store/1"}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(content)
    for name, analysis, seed, message in (
        ("r", "law", 2, r"other settings \(seed 1, now 2\); name another"),
        ("r", "clusters", 1, "a study of law, not of clusters"),
        ("mine", "law", 1, "exists but is not a study"),
        ("store", "law", 1, "exists but is not a study; name another folder"),
        ("mine/thesis.txt/new", "law", 1, "cannot be written: Not a directory; choose another place"),
    ):
        with pytest.raises(DispersionError, match=message):
            Study.open(tmp_path / name, analysis, {"seed": seed})


def test_a_full_disk_is_a_sentence_and_what_was_done_stays(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    done = []
    with pytest.raises(KeyboardInterrupt):
        worked(tmp_path / "r", 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DispersionError, match=r"could not write .*: No space left on device; free some"):
            worked(tmp_path / "r")
    worked(tmp_path / "r", done=done)
    assert done == list(range(3, UNITS))


def test_results_replace_the_work(tmp_path):
    study, _ = worked(tmp_path / "r")
    with pytest.raises(UsageError, match="not complete; repeat its command"):
        read_study(tmp_path / "r")
    frame = pd.DataFrame({"a": [1.0, np.nan], "b": ["x", "y"]})
    study.finish({"points": frame}, model={"name": "m"})
    again = read_study(tmp_path / "r")
    pd.testing.assert_frame_equal(again.tables()["points"], frame)
    assert again.manifest["complete"]
    assert again.manifest["model"] == {"name": "m"}
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == ["manifest.json", "points.parquet"]
    assert Study.open(tmp_path / "r", "law", {"seed": 1}).manifest["complete"]


OPTIONS = {"segment": 12, "segments": 10}


@pytest.fixture
def inputs(tmp_path):
    words = [" ".join(f"w{(i * k) % 90}" for i in range(12)) for k in range(1, 20)]
    text = tiny_models.text_file(tmp_path / "text.jsonl", words)
    return tiny_models.saved(tmp_path / "model", tiny_models.llama()), text


@pytest.mark.parametrize(("what", "message"), [("text", "another text"), ("weights", "other models")])
def test_changed_content_makes_another_study_and_another_name_does_not(
    inputs, tmp_path, what, message, capsys, monkeypatch
):
    model, text = inputs
    study, root = tmp_path / "study", StudyRoot(tmp_path / "studies")
    first = condensation(model, text, folder=study, **OPTIONS)
    kept = condensation(model, text, folder=root, **OPTIONS)
    assert first.manifest["names"] == {"models": [str(model)], "texts": [str(text)]}
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell leaves --study=~/study as it is
    assert condensation(model, text, folder="~/study", **OPTIONS).manifest == first.manifest
    assert read_study("~/study").manifest == first.manifest
    moved = shutil.copytree(model, tmp_path / "moved"), shutil.copy(text, tmp_path / "moved.jsonl")
    assert condensation(*moved, folder=study, **OPTIONS).manifest == first.manifest
    if what == "text":
        text.write_text(text.read_text().replace("w3 ", "w4 "))
    else:
        other = tiny_models.llama()
        with torch.no_grad():
            other.model.layers[1].mlp.down_proj.weight[3, 5] += 0.25
        tiny_models.saved(model, other)
    with pytest.raises(UsageError, match=message + r"\); name another"):
        condensation(model, text, folder=study, **OPTIONS)
    again = condensation(model, text, folder=root, quiet=False, **OPTIONS)
    assert f"the study is kept in {root.root / 'condensation-'}" in capsys.readouterr().err
    assert len(list(root.root.iterdir())) == 2
    assert not again.layers["mean"].equals(kept.layers["mean"])
    assert again.layers["mean"].equals(condensation(model, text, **OPTIONS).layers["mean"])


def test_a_loaded_model_is_its_parameters(inputs):
    loaded = load_model(inputs[0])
    before = model_settings(loaded)
    assert before == model_settings(load_model(inputs[0]))
    with torch.no_grad():
        loaded.model.model.norm.weight[0] += 0.5
    assert model_settings(loaded)["weights"] != before["weights"]


def test_models_are_called_by_the_parts_of_their_names_that_differ(tmp_path, monkeypatch):
    model, other = tmp_path / "model", tmp_path / "after" / "model"
    other.mkdir(parents=True)
    model.mkdir()
    assert labels([str(model)]) == ["model"]
    assert labels([str(model), str(other)]) == [f"{tmp_path.name}/model", "after/model"]
    assert labels(["org/a-7b", ModelChoice("org/a-7b", revision="step1")]) == ["a-7b", "a-7b@step1"]
    adapted = ModelChoice("org/a-7b", adapter="ours/lora", quantize="4bit")
    assert labels([adapted]) == ["a-7b + lora (4bit)"]
    monkeypatch.chdir(model)
    assert labels(["."]) == ["model"]


@pytest.mark.parametrize(
    ("analysis", "options"),
    [
        (condensation, {**OPTIONS, "control": "untrained"}),
        (clusters, {"ngram": 1, "occurrences": 2, "segment": 3}),
    ],
)
def test_one_model_is_in_memory_at_a_time(inputs, tmp_path, monkeypatch, analysis, options):
    earlier, load = [], causal_model.loaded_model

    def loaded(model):
        if isinstance(model, LoadedModel):  # a control's
            return model
        gc.collect()
        assert not [model for model in earlier if model() is not None]
        loaded = load(model)
        earlier.append(weakref.ref(loaded.model))
        return loaded

    models = [inputs[0], shutil.copytree(inputs[0], tmp_path / "other")]
    monkeypatch.setattr(causal_model, "loaded_model", loaded)
    analysis(models, inputs[1], quiet=True, **options)
    assert len(earlier) == 2


_OWN = """
from transformers import LlamaForCausalLM
class Model(LlamaForCausalLM):
    pass
"""


def test_a_control_is_built_by_a_checkpoint_s_own_code(inputs):
    (inputs[0] / "own.py").write_text(_OWN)
    config = json.loads((inputs[0] / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "own.Model"}
    (inputs[0] / "config.json").write_text(json.dumps(config))
    causal = causal_model.CausalModel(ModelChoice(str(inputs[0]), trust_remote_code=True))
    assert type(causal.control("untrained", 0).loaded.model) is type(causal.loaded.model)


def test_batches_are_sized_where_the_system_does_not_tell_its_free_memory(inputs, monkeypatch):
    """macOS has `os.sysconf`, and not this name."""
    names = {name: number for name, number in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
    monkeypatch.setattr(os, "sysconf_names", names)
    monkeypatch.setattr(os, "sysconf", Mock(side_effect=ValueError("unrecognized configuration name")))
    assert causal_model.CausalModel(inputs[0]).batch_size(512, 1, losses=False) == 64


def test_the_commit_of_a_hub_that_cannot_be_reached_is_unknown(monkeypatch):
    refused = Mock(side_effect=Exception("Connection refused"))  # the HTTP library's, which is no OSError
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refused)
    assert data_settings(Texts("org/name:wiki"))["commit"] is None
    refused.assert_called_once()
