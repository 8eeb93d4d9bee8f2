"""The shape of prompts: the same strings in every process, others for other prompts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmeval_dispersion.harness.saving import model_identity, prompt_manifest, source_text

CONFIG = {
    "doc_to_text": "{{question}}\nAnswer:",
    "description": "Questions about high school biology.\n\n",
    "dataset_name": "high_school_biology",
    "target_delimiter": " ",
    "fewshot_delimiter": "\n\n",
    "num_fewshot": 2,
}
OPTIONS = {"fewshot_seed": 1, "chat_template": "c", "multiturn": False, "system": "Be brief."}


def asked(**change: Any) -> Any:
    config = {key: change.get(key, value) for key, value in CONFIG.items()}
    return prompt_manifest(config, **{key: change.get(key, value) for key, value in OPTIONS.items()})


def render(doc: Any) -> str:
    return str(doc["question"])


class Renderer:
    def __call__(self, doc: Any) -> str:
        return str(doc)


def test_functions_are_their_source_and_never_an_address() -> None:
    for function in (render, partial(render, option=1), Renderer(), len):
        assert "0x" not in source_text(function)
    assert "doc[" in source_text(render)
    assert "Renderer" in source_text(Renderer())
    assert source_text(partial(render, option=1)) != source_text(partial(render, option=2))
    assert asked(doc_to_text=render) == asked(doc_to_text=source_text(render))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"doc_to_text": "{{question}}"}, "prompt_template"),
        ({"description": "Other.\n\n"}, "prompt_template"),
        ({"target_delimiter": ""}, "prompt_template"),
        ({"num_fewshot": 3}, "num_fewshot"),
        ({"fewshot_seed": 2}, "fewshot_seed"),
        ({"chat_template": "d"}, "chat_template"),
        ({"multiturn": True}, "multiturn"),
        ({"system": "Be long."}, "system_prompt"),
    ],
)
def test_each_change_is_seen_in_its_own_key(change: dict[str, Any], key: str) -> None:
    other, base = asked(**change)["identity"], asked()["identity"]
    assert {k for k in other if other[k] != base[k]} == {key}


def test_subjects_of_one_benchmark_have_one_template() -> None:
    assert asked(dataset_name="anatomy", description="Questions about anatomy.\n\n") == asked()
    bare = asked(num_fewshot=0, chat_template=None, system=None)["identity"]
    assert bare.keys() == {"prompt_template", "num_fewshot"}


def test_the_models_arguments_that_change_vectors_are_in_its_identity(tmp_path: Path) -> None:
    keys = ("peft", "delta", "add_bos_token", "model")
    lm = SimpleNamespace(pretrained=str(tmp_path), revision="main", **dict.fromkeys(keys))
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.safetensors", "a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    base = model_identity(lm, {})
    assert base.keys() == {"weights"}
    a, b = (model_identity(lm, f"pretrained={tmp_path},gguf_file={name}") for name in ("a.gguf", "b.gguf"))
    assert (a["gguf"], b["gguf"]) == ("a.gguf", "b.gguf")
    assert len({base["weights"], a["weights"], b["weights"]}) == 3
    assert model_identity(lm, {"tokenizer": "org/other"})["tokenizer"] == "org/other"
    assert model_identity(lm, {"tokenizer": str(tmp_path)}) == base
    lm.add_bos_token, lm.peft = True, "org/adapter-that-is-not-cached"
    changed = model_identity(lm, {})
    assert (changed["add_bos_token"], changed["adapter"]) == ("true", lm.peft)
    config = SimpleNamespace(_commit_hash="0" * 40)
    lm.pretrained, lm.model = "org/name", SimpleNamespace(config=config, dtype="float32")
    assert model_identity(lm, {})["weights"] == f"org/name@{'0' * 40}"
