"""Identity: whatever changes the vectors changes it, and nothing else does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch

from lmeval_dispersion.model.loading import adapter_identity, load_model, settings_identity, weights_identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny_models.saved(tmp_path / "tiny-llama", tiny_models.llama()))


def test_a_folder_is_its_weights_configuration_and_tokenizer_whatever_it_is_called(folder: Path) -> None:
    found = weights_identity(folder)
    assert str(found).startswith("sha256:")
    copy = folder.parent / "renamed"
    shutil.copytree(folder, copy)
    (copy / "optimizer.pt").write_bytes(b"state")
    (copy / "README.md").write_text("text")
    assert weights_identity(copy) == found
    for name in ("config.json", "tokenizer.json"):
        changed = folder.parent / f"other-{name}"
        shutil.copytree(folder, changed)
        (changed / name).write_text((changed / name).read_text() + " ")
        assert weights_identity(changed) != found, name


def test_retrained_weights_of_one_name_size_and_time_differ(folder: Path) -> None:
    before = weights_identity(folder)
    file = folder / "model.safetensors"
    about = file.stat()
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1  # one bit of one weight; names, shapes and size as they were
    # Trainers write a new file; a time that was put back does not hide it.
    (folder / "new").write_bytes(raw)
    (folder / "new").replace(file)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert weights_identity(folder) != before


def test_two_ggufs_of_one_folder_and_two_commits_of_the_hub_differ(tmp_path: Path) -> None:
    for name in ("a.Q4.gguf", "a.Q8.gguf"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    first, second = (weights_identity(tmp_path, gguf=name) for name in ("a.Q4.gguf", "a.Q8.gguf"))
    assert first is not None
    assert first != second
    assert weights_identity(tmp_path) is None  # which of them, nobody knows
    assert weights_identity("org/name", "a" * 40) == f"org/name@{'a' * 40}"
    assert weights_identity("org/name-that-is-not-cached", "main") is None


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")
def test_base_adapter_and_dtype_differ(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    for seed in (1, 2):
        base_model = tiny_models.llama()
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        wrapped = peft.get_peft_model(base_model, config)
        wrapped.save_pretrained(folder.parent / f"adapter-{seed}")
    base = load_model(folder).identity
    half = load_model(folder, dtype="bfloat16").identity
    first, second = (load_model(folder, adapter=folder.parent / f"adapter-{s}").identity for s in (1, 2))
    assert base.keys() == {"weights", "dtype"}
    assert {**half, "dtype": "float32"} == base
    assert {k: v for k, v in first.items() if k != "adapter"} == base
    assert first["adapter"] != second["adapter"]
    assert first["adapter"] == adapter_identity(folder.parent / "adapter-1")


def test_quantisation_is_its_settings(folder: Path) -> None:
    model = load_model(folder).model
    assert "quantization" not in settings_identity(model)
    seen = set()
    for bits in ("4", "8"):
        model.config.quantization_config = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}
        seen.add(settings_identity(model)["quantization"])
    assert len(seen) == 2
