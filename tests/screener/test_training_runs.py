"""Folders of training runs, as the trainers lay them out."""

from __future__ import annotations

import pytest
from lmeval_screener.targets import parse_targets, run_and_step


def model(folder, *files):
    folder.mkdir(parents=True)
    for name in files or ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        # Trainer and TRL
        (["checkpoint-100", "checkpoint-20"], ["checkpoint-20", "checkpoint-100"]),
        # torchtitan
        (["checkpoint/step-10", "checkpoint/step-5"], ["checkpoint/step-5", "checkpoint/step-10"]),
        # NeMo: RL, AutoModel, and exports of 2.0
        (["step_100/policy/weights"], ["step_100/policy/weights"]),
        (["checkpoints/epoch_0_step_9/consolidated"], ["checkpoints/epoch_0_step_9/consolidated"]),
        (["m--loss=1.2-step=999-consumed_samples=8"], ["m--loss=1.2-step=999-consumed_samples=8"]),
        # Megatron-LM, converted
        (["iter_0001000", "iter_0000500_hf"], ["iter_0000500_hf", "iter_0001000"]),
        # DeepSpeed, verl
        (["global_step_20/actor/huggingface", "global_step_100/actor/huggingface"],
         ["global_step_20/actor/huggingface", "global_step_100/actor/huggingface"]),
        (["global_step100"], ["global_step100"]),
    ],
)  # fmt: skip
def test_a_run_is_its_checkpoints_in_the_order_of_their_steps(tmp_path, folders, found):
    for folder in folders:
        model(tmp_path / "run1" / folder)
    targets = parse_targets([str(tmp_path / "run1")])
    assert [target.repo for target in targets] == [str(tmp_path / "run1" / name) for name in found]
    assert all(target.local for target in targets)
    assert {run_and_step(target.repo)[0] for target in targets} == {str(tmp_path / "run1")}


def test_the_final_model_of_a_run_comes_last(tmp_path):
    for name in ("checkpoint-5", "checkpoint-10"):
        model(tmp_path / "run1" / name)
    (tmp_path / "run1" / "model.safetensors").write_text("")
    found = [target.repo for target in parse_targets([str(tmp_path / "run1")])]
    assert found[2:] == [str(tmp_path / "run1")]


def test_the_joined_weights_are_taken_and_not_the_shards_above_them(tmp_path):
    model(tmp_path / "run1" / "step_5" / "model", "shard-00001.safetensors")
    model(tmp_path / "run1" / "step_5" / "model" / "consolidated")
    (target,) = parse_targets([str(tmp_path / "run1")])
    assert target.repo.endswith("step_5/model/consolidated")


def test_a_step_by_its_own_name_and_folders_that_are_no_run(tmp_path):
    model(tmp_path / "run1" / "global_step_20" / "actor" / "huggingface")
    (target,) = parse_targets([str(tmp_path / "run1" / "global_step_20")])
    assert target.repo.endswith("actor/huggingface")
    model(tmp_path / "plain")
    model(tmp_path / "Step-3.5-flash")
    (tmp_path / "empty").mkdir()
    for name in ("plain", "Step-3.5-flash", "empty"):
        assert [target.repo for target in parse_targets([str(tmp_path / name)])] == [str(tmp_path / name)]
        assert run_and_step(str(tmp_path / name)) is None


def test_a_glob_of_paths_is_what_matches_it(tmp_path, monkeypatch):
    for name in ("m1", "m10", "m2", "m11/checkpoint-5", "m11/checkpoint-10"):
        (tmp_path / "many" / name).mkdir(parents=True)
        (tmp_path / "many" / name / "model.safetensors").touch()
    (tmp_path / "many" / "m1.txt").touch()
    (tmp_path / "many" / "a.gguf").touch()
    (tmp_path / "odd[1]").mkdir()
    monkeypatch.chdir(tmp_path)

    def repos(text):
        return [target.label for target in parse_targets([text])]

    run = ["many/m11/checkpoint-5", "many/m11/checkpoint-10"]
    assert repos("./many/m1*") == ["many/m1", "many/m10", *run]
    assert repos(f"{tmp_path}/many/m?") == [f"{tmp_path}/many/m1", f"{tmp_path}/many/m2"]
    assert repos("./many/*.gguf") == ["many:a.gguf"]
    assert repos("./odd[1]") == ["odd[1]"]
    (refused,) = parse_targets(["./none*"])
    assert refused.refused is not None
    assert refused.refused[0] == "FolderNotFound"
