"""Adapters as others leave them; the judge is PEFT's merged model, or what transformers itself loads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from field_case import Cases, Expected
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_checkpoints import right, right_of, save_tokenizer, tiny, write_config, write_weights
from transformers import AutoModelForCausalLM, PreTrainedModel

ADAPTERS = Cases()
FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."


def save_base(folder: Path, tied: bool = False, seed: int = 1) -> PreTrainedModel:
    """A whole model with its tokenizer in a folder."""
    model = tiny("llama", tied=tied, seed=seed)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_lora(
    folder: Path, model: PreTrainedModel, base: str, trained: bool = True, **settings: Any
) -> None:
    """A LoRA as PEFT saves it, with ``base`` as its base's name; all its numbers moved if ``trained``."""
    given = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "lm_head"]}
    torch.manual_seed(7)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**(given | settings)))
    if trained:
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(folder)
    edit(folder, base_model_name_or_path=base)


def edit(folder: Path, **changes: Any) -> None:
    """Change settings in a folder's adapter_config.json."""
    place = folder / "adapter_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))


def rename(folder: Path, name_of: Callable[[str], str]) -> None:
    """Save an adapter's tensors under other names."""
    tensors = load_file(folder / FILE)
    save_file({name_of(name): tensor for name, tensor in tensors.items()}, folder / FILE)


def merged(base: Path, folder: Path) -> dict[str, float]:
    """The right values of PEFT's merged model."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    return right_of(model.merge_and_unload())


def loaded(folder: Path) -> dict[str, float]:
    """The right values of what ``from_pretrained`` makes of a folder with an adapter and whole weights."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    head = model.get_output_embeddings()
    if hasattr(head, "merge"):
        head.merge()
        head = head.get_base_layer()
    return right(head.weight.detach().numpy(), model.model.norm.weight.detach().numpy())


@ADAPTERS.case("https://github.com/huggingface/trl/issues/926")
def adapter_wrapped_twice(folder: Path) -> Expected:
    """``get_peft_model`` of a PEFT model: PEFT puts none of its tensors on a plain base."""
    model = save_base(folder / "base")
    save_lora(folder / "adapter", model, str(folder / "base"))
    rename(folder / "adapter", lambda name: PREFIX + name)
    assert merged(folder / "base", folder / "adapter") == right_of(model)
    refused = {"adapter": ("belongs to a module of its base", "get_peft_model", PREFIX)}
    return Expected(target="adapter", refused=refused)


@ADAPTERS.case("https://github.com/huggingface/peft/issues/2412")
def adapter_of_automodel(folder: Path) -> Expected:
    """Trained on AutoModel, without a head: its names lack one ``model.``."""
    model = save_base(folder / "base", tied=True)
    save_lora(
        folder / "adapter", model, str(folder / "base"), target_modules=["q_proj", "embed_tokens"]
    )
    rename(folder / "adapter", lambda name: name.replace("model.model.model.", "model.model.", 1))
    assert merged(folder / "base", folder / "adapter") == right_of(model)
    refused = {"adapter": ("belongs to a module of its base", "AutoModel", "model.")}
    return Expected(target="adapter", refused=refused)


@ADAPTERS.case("https://github.com/huggingface/peft/issues/1932")
def adapter_that_fits_in_part(folder: Path) -> Expected:
    """The head's change has another wrapper's name, the body's fits: PEFT leaves the head to the base."""
    model = save_base(folder / "base")
    save_lora(folder / "adapter", model, str(folder / "base"))
    rename(folder / "adapter", lambda name: name.replace("lm_head", "model.lm_head"))
    values = {"adapter": merged(folder / "base", folder / "adapter")}
    notes = {
        "adapter": (
            "3 of the adapter's 5 tensors (first:",
            "model.lm_head",
            "same rows as its base",
        )
    }
    return Expected(target="adapter", values=values, notes=notes)


@ADAPTERS.case("https://github.com/huggingface/transformers/pull/43781")
def adapter_beside_full_model(folder: Path) -> Expected:
    """transformers 5 puts the adapter on the weights in the same folder, whatever base it names."""
    model = save_base(folder / "with-adapter")
    save_base(folder / "whole-alone")
    save_lora(folder / "with-adapter", model, "ibm-granite/granite-speech-3.3-2b")
    values = {"with-adapter": loaded(folder / "with-adapter"), "whole-alone": right_of(model)}
    notes = {"with-adapter": ("to the weights next to it", "transformers 4", "granite")}
    return Expected(values=values, notes=notes, silent=("is a copy of",))


@ADAPTERS.case("https://github.com/axolotl-ai-cloud/axolotl/issues/1391")
def embedding_adapter_beside_full_model(folder: Path) -> Expected:
    """transformers does not merge: a head that is tied to the embedding lacks the embedding's change."""
    model = save_base(folder / "run", tied=True)
    save_lora(folder / "run", model, "base", target_modules=["embed_tokens"])
    return Expected(target="run", values={"run": loaded(folder / "run")})


@ADAPTERS.case("https://docs.pytorch.org/torchtune/stable")
def torchtune_epochs(folder: Path) -> Expected:
    """Whole weights and an adapter that was not trained, in every epoch's folder; and a copy without it."""
    values = {}
    for seed, name in ((1, "epoch_0"), (2, "epoch_1")):
        model = save_base(folder / name, seed=seed)
        save_lora(
            folder / name,
            model,
            "meta-llama/Llama-3.2-1B",
            trained=False,
            target_modules=["q_proj"],
        )
        values[name] = loaded(folder / name)
    save_base(folder / "merged", seed=2)
    notes = {name: ("changes nothing", "lora_B") for name in values}
    return Expected(values=values, notes=notes, copies={"merged": "epoch_1"})


@ADAPTERS.case("https://huggingface.co/docs/peft/package_reference/lora")
def adapter_of_alpha_zero(folder: Path) -> Expected:
    """``lora_alpha: 0``: whatever was trained counts for nothing."""
    model = save_base(folder / "base")
    save_lora(folder / "adapter", model, str(folder / "base"), lora_alpha=0)
    values = {"adapter": merged(folder / "base", folder / "adapter")}
    return Expected(
        target="adapter", values=values, notes={"adapter": ("changes nothing", "lora_alpha is 0")}
    )


@ADAPTERS.case("https://github.com/huggingface/peft/issues/1402")
def adapter_that_training_left_alone(folder: Path) -> Expected:
    """DeepSpeed trained a copy: every lora_B is zero, as it began."""
    model = save_base(folder / "base")
    save_lora(folder / "adapter", model, str(folder / "base"), trained=False)
    values = {"adapter": merged(folder / "base", folder / "adapter")}
    return Expected(
        target="adapter", values=values, notes={"adapter": ("changes nothing", "lora_B")}
    )


@ADAPTERS.case("https://github.com/huggingface/peft/issues/2500")
def adapter_of_zero3(folder: Path) -> Expected:
    """Saved under ZeRO-3 without gathering: every tensor has shape [0], and PEFT loads none."""
    model = save_base(folder / "base")
    save_lora(folder / "adapter", model, str(folder / "base"), target_modules=["q_proj"])
    tensors = load_file(folder / "adapter" / FILE)
    write_weights(folder / "adapter" / FILE, {name: torch.zeros(0) for name in tensors})
    refused = {"adapter": ("ZeRO-3", "stage3_gather_16bit_weights_on_model_save")}
    return Expected(target="adapter", refused=refused)


@ADAPTERS.case("https://github.com/huggingface/transformers/pull/43781")
def adapter_config_beside_full_model(folder: Path) -> Expected:
    """The adapter's configuration without its weights: transformers 5 loads no such folder."""
    model = save_base(folder / "run")
    save_lora(folder / "run", model, "base")
    (folder / "run" / FILE).unlink()
    return Expected(
        target="run", refused={"run": ("adapter_model.safetensors", "remove that file")}
    )


@ADAPTERS.case("https://github.com/TFM-HITESH/MedAI")
def adapters_of_an_unreachable_base(folder: Path) -> Expected:
    """Names alone show that adapters of attention leave the rows to a base that cannot be read."""
    model = tiny("llama", tied=False, seed=1)
    for name in ("checkpoint-500", "checkpoint-1000"):
        save_lora(
            folder / name, model, "HuggingFaceTB/SmolLM-135M-Instruct", target_modules=["q_proj"]
        )
    said = (
        "Nothing to rank",
        "if their tensor names fit that base",
        "HuggingFaceTB/SmolLM-135M-Instruct",
        "dispersion race",
    )
    return Expected(said=said, silent=("could be screened",))


@ADAPTERS.case("https://github.com/huggingface/text-generation-inference/issues/1334")
def adapter_of_a_windows_path(folder: Path) -> Expected:
    """The head changes, and its base is a path of another machine."""
    model = tiny("llama", tied=False, seed=1)
    save_lora(folder / "adapter", model, r"C:\Users\me\models\base")
    refused = {"adapter": ("relative to another folder", "base_model_name_or_path")}
    return Expected(target="adapter", refused=refused)


@ADAPTERS.case("https://github.com/huggingface/peft/blob/main/docs/source/developer_guides/lora.md")
def adapter_with_expressions(folder: Path) -> Expected:
    """Rank and alpha of modules by expressions, as PEFT's guide writes them."""
    model = save_base(folder / "base")
    patterns = {r"model\.layers\.\d+\.self_attn\.(q|k)_proj": 8, r"^lm_head$": 2}
    settings = {"rank_pattern": patterns, "alpha_pattern": patterns}
    save_lora(folder / "adapter", model, str(folder / "base"), **settings)
    return Expected(
        target="adapter", values={"adapter": merged(folder / "base", folder / "adapter")}
    )


@ADAPTERS.case(
    "https://owasp.org/www-community/attacks/Regular_expression_Denial_of_Service_-_ReDoS"
)
def adapter_with_an_evil_expression(folder: Path) -> Expected:
    """An expression over which a backtracking engine does not end."""
    model = save_base(folder / "base")
    save_lora(folder / "adapter", model, str(folder / "base"))
    edit(folder / "adapter", alpha_pattern={r"(\w+)+!": 3})
    refused = {"adapter": ("alpha_pattern", "merge_and_unload")}
    return Expected(target="adapter", refused=refused)


@ADAPTERS.case("https://github.com/huggingface/safetensors")
def adapter_with_a_name_of_dots(folder: Path) -> Expected:
    """One tensor with a name of 40 kB of dots, among others that fit."""
    model = save_base(folder / "base")
    save_lora(folder / "adapter", model, str(folder / "base"))
    tensors = load_file(folder / "adapter" / FILE)
    write_weights(folder / "adapter" / FILE, tensors | {"a." * 20_000 + "weight": torch.zeros(1)})
    return Expected(target="adapter", refused={"adapter": ("has 40,006 characters",)})


@ADAPTERS.case("https://github.com/axolotl-ai-cloud/axolotl/pull/1029")
def merged_next_to_its_adapters(folder: Path) -> Expected:
    """axolotl's output: merged/ names no base, the adapters do; it has the rows of the last of them."""
    model = save_base(folder / "base")
    run = folder / "lora-out"
    values = {}
    for place, rank in ((run / "checkpoint-53", 2), (run / "checkpoint-106", 4), (run, 4)):
        save_lora(place, model, str(folder / "base"), r=rank)
        save_tokenizer(place)
        values[place.name] = merged(folder / "base", place)
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), run)
    whole.merge_and_unload().save_pretrained(run / "merged")
    save_tokenizer(run / "merged")
    values["merged"] = values["lora-out"]
    return Expected(
        target="lora-out",
        values=values | {"base": right_of(model)},
        notes={"base": ("taken as the base",)},
        same_rank={"merged": "lora-out", "checkpoint-106": "lora-out"},
    )


@ADAPTERS.case("https://github.com/unslothai/unsloth/issues/3297")
def merged_in_the_folder_of_its_adapter(folder: Path) -> Expected:
    """A run without steps, in bfloat16: what was merged has the adapter's rows within rounding."""
    base = tiny("llama", tied=False, seed=1).to(torch.bfloat16)
    base.save_pretrained(folder / "the-base-of-all")
    save_tokenizer(folder / "the-base-of-all")
    run = folder / "out"
    save_lora(run, base.float(), str(folder / "the-base-of-all"))
    save_tokenizer(run)
    stored = AutoModelForCausalLM.from_pretrained(folder / "the-base-of-all", dtype=torch.bfloat16)
    whole = PeftModel.from_pretrained(stored, run).merge_and_unload()
    whole.save_pretrained(run / "merged")
    save_tokenizer(run / "merged")
    return Expected(
        target="out",
        values={"merged": right_of(whole.float())},
        said=(
            "Nothing to rank",
            "merged and final model have equal output rows",
            "dispersion race",
        ),
        same_rank={"out": "merged"},
    )


@ADAPTERS.case("https://github.com/axolotl-ai-cloud/axolotl/pull/1029")
def merged_as_near_to_two_adapters(folder: Path) -> Expected:
    """Two steps that differ by less than what was merged was rounded: it has the rows of neither."""
    base = tiny("llama", tied=False, seed=1).to(torch.bfloat16)
    base.save_pretrained(folder / "base")
    save_tokenizer(folder / "base")
    run = folder / "out"
    for name in ("checkpoint-10", "checkpoint-20"):
        save_lora(run / name, base.float(), str(folder / "base"))
        save_tokenizer(run / name)
    later = load_file(run / "checkpoint-20" / FILE)
    moved = {name: tensor + 1e-5 * torch.randn_like(tensor) for name, tensor in later.items()}
    write_weights(run / "checkpoint-20" / FILE, moved)
    stored = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    whole = PeftModel.from_pretrained(stored, run / "checkpoint-20").merge_and_unload()
    whole.save_pretrained(run / "merged")
    save_tokenizer(run / "merged")
    values = {"merged": right_of(whole.float())}
    return Expected(target="out", values=values, silent=("has the rows of", '"equal_rows_with": "'))


@ADAPTERS.case("https://github.com/unslothai/unsloth")
def adapter_next_to_its_base(folder: Path) -> Expected:
    """One adapter of the attention and its base: the race that is offered takes both."""
    model = save_base(folder / "base")
    save_lora(folder / "outputs", model, str(folder / "base"), target_modules=["q_proj"])
    said = (
        "Nothing to rank: outputs has the output rows of its base (base)",
        f"race {folder} --tasks",
    )
    values = {"base": right_of(model), "outputs": right_of(model)}
    return Expected(values=values, said=said, silent=("Race all",))


@ADAPTERS.case("https://github.com/verl-project/verl/blob/main/verl/workers/fsdp_workers.py")
def lora_of_verl(folder: Path) -> Expected:
    """verl saves a LoRA by PEFT, beside its own shards and a folder of configuration alone."""
    model = save_base(folder / "base")
    actor = folder / "run" / "global_step_20" / "actor"
    save_tokenizer(actor / "huggingface")
    write_config(actor / "huggingface", model)
    for rank in (0, 1):
        torch.save({}, actor / f"model_world_size_2_rank_{rank}.pt")
    save_lora(actor / "lora_adapter", model, str(folder / "base"))
    values = {"lora_adapter": merged(folder / "base", actor / "lora_adapter")}
    return Expected(target="run", values=values)


@ADAPTERS.case(
    "https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/peft.py"
)
def pickled_adapter_beside_full_model(folder: Path) -> Expected:
    """transformers looks for adapter_model.safetensors alone, and fails."""
    model = save_base(folder / "run")
    save_lora(folder / "run", model, "base")
    torch.save(load_file(folder / "run" / FILE), folder / "run" / "adapter_model.bin")
    (folder / "run" / FILE).unlink()
    with pytest.raises(OSError, match=FILE):
        AutoModelForCausalLM.from_pretrained(folder / "run")
    return Expected(target="run", refused={"run": ("adapter_model.bin", FILE, "save_pretrained")})
