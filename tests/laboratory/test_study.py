"""Studies: known by the content of their inputs, resumed to the same bits wherever they were stopped."""

from __future__ import annotations

import errno
import gc
import inspect
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

import lmeval_dispersion
from lmeval_dispersion import clusters, condensation
from lmeval_dispersion.cli import main, parser_of
from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.laboratory import commands
from lmeval_dispersion.laboratory import models as models_module
from lmeval_dispersion.laboratory.study import Study, data_settings, labels, model_settings
from lmeval_dispersion.model.loading import LoadedModel, ModelChoice, load_model
from lmeval_dispersion.model.texts import Texts

UNITS = 23


def worked(folder, stop_at=None, done=None):
    """The units of a study, each with two arrays; stops in the middle of unit ``stop_at``."""

    def do(unit):
        if unit == stop_at:
            raise KeyboardInterrupt
        if done is not None:
            done.append(unit)
        return {"square": np.array(unit**2), "rows": np.full(unit % 3, unit / 7)}

    study = Study(folder, Mock(), {}, {}, quiet=True)
    return list(study.kept("squares", range(UNITS), do))


def test_a_study_stopped_again_and_again_ends_like_one_that_was_not(tmp_path):
    expected, done = worked(tmp_path / "whole"), []
    for stop in (0, 5, 6, 22):
        with pytest.raises(KeyboardInterrupt):
            worked(tmp_path / "stopped", stop, done)
    (tmp_path / "stopped" / "squares" / ".23.npz.1").write_bytes(b"PK")  # as a kill leaves it
    units = worked(tmp_path / "stopped", done=done)
    assert done == list(range(UNITS))  # each once
    assert [unit["square"] for unit in units] == [unit**2 for unit in range(UNITS)]
    for unit, other in zip(units, expected, strict=True):
        assert np.array_equal(unit["rows"], other["rows"])


def test_a_full_disk_is_a_sentence_and_what_was_done_stays(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    done = []
    with pytest.raises(KeyboardInterrupt):
        worked(tmp_path / "r", 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            DispersionError, match=r"could not write .*: No space left on device; free some"
        ):
            worked(tmp_path / "r")
    worked(tmp_path / "r", done=done)
    assert done == list(range(3, UNITS))


@pytest.mark.parametrize("measure", commands.MEASURES)
def test_the_help_has_the_default_of_each_measure_s_option(measure):
    actions = {action.dest: action for action in parser_of("inspect")[0]._actions}
    for name, parameter in inspect.signature(
        getattr(lmeval_dispersion, measure)
    ).parameters.items():
        action = actions.get(name)
        if action is None or name in ("data", "models", "quiet", "folder"):
            continue
        default = parameter.default
        numbers = str(default).strip("()").replace(" ", "").replace("False", "no")
        shown = action.help.partition("(default: ")[2].replace("none", "None")
        assert numbers in shown, name
        if not shown.startswith(numbers):
            assert f"for {measure} {numbers}" in shown, name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("law m --data t --control WRONG", "--control: invalid choice: 'WRONG'"),
        (
            "law m --data t --contexts 1,b",
            "--contexts: expected whole numbers separated by commas, such as 16,64, got '1,b'",
        ),
        ("law m", "the following arguments are required: --data"),
        (
            "clusters m --data t --bins 9",
            "--bins: expected an option that clusters takes, got one that belongs to law",
        ),
        ("sublayers m n --data t", "expected one model for sublayers, got m, n"),
        ("clusters m --data t u", "--data: expected one text for clusters, got t, u"),
    ],
)
def test_a_measure_refuses_what_it_does_not_take(words, message, capsys):
    try:
        status = main(["inspect", *words.split()])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_control_that_is_none_is_refused_before_a_model_is_loaded():
    with pytest.raises(UsageError, match="control: expected untrained or shuffled, got 'random'"):
        lmeval_dispersion.law("m", "t", control=["shuffled", "random"])


OPTIONS = {"segment": 12, "segments": 10}


@pytest.fixture
def inputs(tmp_path):
    words = [" ".join(f"w{(i * k) % 90}" for i in range(12)) for k in range(1, 20)]
    text = tiny_models.text_file(tmp_path / "text.jsonl", words)
    return tiny_models.saved(tmp_path / "model", tiny_models.llama()), text


def test_rows_replace_the_work_and_are_read_again(inputs, tmp_path, monkeypatch):
    (tmp_path / "thesis.txt").write_text("mine")
    made = condensation(*inputs, folder=tmp_path, **OPTIONS)
    (place,) = tmp_path.glob("condensation-*")
    assert place.suffix == ".json"
    with monkeypatch.context() as patch:
        patch.setattr(models_module, "loaded_model", Mock(side_effect=AssertionError("loaded")))
        again = condensation(*inputs, folder=tmp_path, **OPTIONS)
    assert again.to_dict() == made.to_dict()
    for name in ("summary", "layers", "histogram", "texts"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(made, name), check_exact=True)
    with pytest.raises(
        DispersionError, match="cannot be written: Not a directory; choose another folder"
    ):
        condensation(*inputs, folder=tmp_path / "thesis.txt", **OPTIONS)


def test_a_family_with_another_member_runs_that_member_alone(inputs, tmp_path, monkeypatch):
    model, text = inputs
    other = tiny_models.saved(tmp_path / "other", tiny_models.llama(seed=1))
    alone = condensation(model, text, folder=tmp_path / "studies", **OPTIONS)
    load = Mock(side_effect=models_module.loaded_model)
    monkeypatch.setattr(models_module, "loaded_model", load)
    both = condensation([model, other], text, folder=tmp_path / "studies", **OPTIONS)
    chosen = [call.args[0] for call in load.call_args_list]
    assert [each.name for each in chosen if isinstance(each, ModelChoice)] == [str(other)]
    assert both.layers["model"].unique().tolist() == ["model", "other"]
    first = both.layers[both.layers["model"] == "model"].reset_index(drop=True)
    pd.testing.assert_frame_equal(first, alone.layers, check_exact=True)


@pytest.mark.parametrize("what", ["text", "weights"])
def test_changed_content_makes_another_study_and_another_name_does_not(
    inputs, tmp_path, what, capsys, monkeypatch
):
    model, text = inputs
    root = tmp_path / "studies"
    first = condensation(model, text, folder=root, **OPTIONS)
    assert first.manifest["names"] == {"models": [str(model)], "texts": [str(text)]}
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell leaves --study=~/studies as it is
    assert condensation(model, text, folder="~/studies", **OPTIONS).manifest == first.manifest
    moved = shutil.copytree(model, tmp_path / "moved"), shutil.copy(text, tmp_path / "moved.jsonl")
    elsewhere = condensation(*moved, folder=root, **OPTIONS)
    assert elsewhere.layers["mean"].equals(first.layers["mean"])
    assert elsewhere.layers["model"].unique() == ["moved"]
    assert len(list(root.iterdir())) == 1
    if what == "text":
        text.write_text(text.read_text().replace("w3 ", "w4 "))
    else:
        other = tiny_models.llama()
        with torch.no_grad():
            other.model.layers[1].mlp.down_proj.weight[3, 5] += 0.25
        tiny_models.saved(model, other)
    again = condensation(model, text, folder=root, quiet=False, **OPTIONS)
    assert f"results are kept in {root}: condensation-" in capsys.readouterr().err
    assert len(list(root.iterdir())) == 2
    assert not again.layers["mean"].equals(first.layers["mean"])
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
    earlier, load = [], models_module.loaded_model

    def loaded(model):
        if isinstance(model, LoadedModel):  # a control's
            return model
        gc.collect()
        assert not [model for model in earlier if model() is not None]
        loaded = load(model)
        earlier.append(weakref.ref(loaded.model))
        return loaded

    models = [inputs[0], tiny_models.saved(tmp_path / "other", tiny_models.llama(seed=1))]
    monkeypatch.setattr(models_module, "loaded_model", loaded)
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
    causal = models_module.CausalModel(ModelChoice(str(inputs[0]), trust_remote_code=True))
    assert type(causal.control("untrained", 0).loaded.model) is type(causal.loaded.model)


def test_the_commit_of_a_hub_that_cannot_be_reached_is_unknown(monkeypatch):
    refused = Mock(
        side_effect=Exception("Connection refused")
    )  # the HTTP library's, which is no OSError
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refused)
    assert data_settings(Texts("org/name:wiki"))["commit"] is None
    refused.assert_called_once()
