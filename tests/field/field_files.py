"""A model's weights files among others: what transformers loads from a folder, and what lies beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from field_case import Cases, Expected
from tiny_checkpoints import right_of, save_tokenizer, tiny, write_config, write_weights
from tiny_gguf import write_gguf, write_gguf_adapter, write_gguf_projector

FILES = Cases()
INDEX = "model.safetensors.index.json"


def write_shards(
    folder: Path, tensors: Mapping[str, torch.Tensor], count: int, index: str = INDEX
) -> None:
    """Shards and their index, as save_pretrained writes them."""
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for at, name in enumerate(sorted(tensors)):
        file = f"model-{at % count + 1:05}-of-{count:05}.safetensors"
        shards.setdefault(file, {})[name] = tensors[name]
    for file, stored in shards.items():
        write_weights(folder / file, stored)
    if index:
        places = {name: file for file, stored in shards.items() for name in stored}
        (folder / index).write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
        )


def _two(folder: Path, names: Iterable[str]) -> Expected:
    """Two folders of one sharded model; the first is the original."""
    model = tiny("llama", tied=False, seed=1)
    values = {}
    for name in names:
        place = folder / name
        place.mkdir()
        write_shards(place, model.state_dict(), 2)
        write_config(place, model)
        save_tokenizer(place)
        values[name] = right_of(model)
    first, second = values
    said = (f"Nothing to rank: {second} is a copy of {first}",)
    return Expected(values=values, copies={second: first}, said=said, silent=("Race all",))


@FILES.case("https://github.com/NVIDIA/TensorRT-LLM/issues/1732")
def mistral_both_forms(folder: Path) -> Expected:
    """mistralai's repositories: consolidated.safetensors, in other names, beside the shards."""
    expected = _two(folder, ["as-saved", "published"])
    other = tiny("llama", tied=False, seed=2).state_dict()
    native = {name.removeprefix("model."): tensor for name, tensor in other.items()}
    write_weights(folder / "published" / "consolidated.safetensors", native)
    (folder / "published" / "params.json").write_text(json.dumps({"dim": 16, "n_layers": 1}))
    return expected


@FILES.case("https://github.com/huggingface/transformers/pull/16343")
def stale_shards(folder: Path) -> Expected:
    """A folder saved twice: shards of another number stay beside the new ones and their index."""
    expected = _two(folder, ["clean", "saved-twice"])
    old = tiny("llama", tied=False, seed=2).state_dict()
    write_shards(folder / "saved-twice", old, 3, index="")
    return expected


@FILES.case("https://github.com/mistralai/mistral-finetune/issues/64")
def pickled_beside_foreign_safetensors(folder: Path) -> Expected:
    """pytorch_model.bin beside a safetensors file of another program: transformers takes the first."""
    model = tiny(seed=1)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    write_weights(folder / "value_head.safetensors", tiny(seed=2).state_dict())
    write_config(folder, model)
    save_tokenizer(folder)
    return Expected(values={folder.name: right_of(model)})


@FILES.case("https://github.com/AutoGPTQ/AutoGPTQ/blob/main/auto_gptq/modeling/_base.py")
def one_file_of_another_name(folder: Path) -> Expected:
    """A lone safetensors file of another name is read, with a note."""
    model = tiny("llama", tied=False, seed=1)
    write_weights(folder / "gptq_model-4bit-128g.safetensors", model.state_dict())
    write_config(folder, model)
    save_tokenizer(folder)
    notes = {folder.name: ("gptq_model-4bit-128g.safetensors, the only safetensors file",)}
    return Expected(values={folder.name: right_of(model)}, notes=notes)


@FILES.case("https://github.com/unslothai/unsloth/issues/3297")
def gguf_with_training_state(folder: Path) -> Expected:
    """save_pretrained_gguf into a Trainer's output: training_args.bin and its kind hide no GGUF."""
    model = tiny("llama", tied=False, seed=1)
    write_gguf(folder / "unsloth.F32.gguf", model)
    write_config(folder, model)
    save_tokenizer(folder)
    state = (
        "training_args.bin",
        "optimizer.bin",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
    )
    for name in state:
        torch.save({}, folder / name)
    return Expected(values={folder.name: right_of(model)})


@FILES.case("https://github.com/ggml-org/llama.cpp/blob/master/convert_lora_to_gguf.py")
def gguf_beside_what_is_no_model(folder: Path) -> Expected:
    """A model's GGUF beside those of a LoRA and of a projector, whose headers alone say so."""
    model = tiny("llama", tied=False, seed=1)
    write_gguf(folder / "m-F32.gguf", model)
    write_gguf_adapter(folder / "a-f16.gguf")
    write_gguf_projector(folder / "vision-f16.gguf")
    return Expected(values={folder.name: right_of(model)})


@FILES.case("https://github.com/ggml-org/llama.cpp/blob/master/convert_lora_to_gguf.py")
def gguf_adapter_alone(folder: Path) -> Expected:
    """Nothing but a LoRA's GGUF."""
    write_gguf_adapter(folder / "a-f16.gguf")
    return Expected(refused={folder.name: ("LoRA adapter", "llama-export-lora")})


@FILES.case("https://github.com/huggingface/transformers/issues/20082")
def pickled_copies(folder: Path) -> Expected:
    """One model three times: in one file, and pickled twice."""
    model = tiny("llama", tied=False, seed=1)
    names = ("as-saved", "pickled", "pickled-too")
    for name in names:
        place = folder / name
        place.mkdir()
        write_config(place, model)
        save_tokenizer(place)
    write_weights(folder / "as-saved" / "model.safetensors", model.state_dict())
    for name in names[1:]:
        torch.save(model.state_dict(), folder / name / "pytorch_model.bin")
    return Expected(
        values={name: right_of(model) for name in names},
        copies={"pickled": "as-saved", "pickled-too": "as-saved"},
        said=("Nothing to rank: pickled and pickled-too are copies of as-saved",),
        silent=("Race all",),
    )
