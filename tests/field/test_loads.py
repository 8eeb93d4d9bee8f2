"""Checkpoints whose files lack weights, as others leave them, and those that only seem to."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZE, llama, saved
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2_5_VLConfig

from lmeval_dispersion.errors import DispersionError, HarnessError
from lmeval_dispersion.harness import adapters, seams
from lmeval_dispersion.model.load_report import watched_loads
from lmeval_dispersion.model.loading import load_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT, about transformers and torch
Tensors = dict[str, torch.Tensor]
ALL, OF_A_BLOCK = 30, 9  # tensors of the model, and of one of its three blocks


class Case(NamedTuple):
    """A checkpoint made of a whole one: its tensors, and what config.json says in addition."""

    source: str
    tensors: Callable[[Tensors], Tensors]
    parts: tuple[str, ...]  # of the sentence; empty where the load is complete
    config: Mapping[str, object] = MappingProxyType({})


def under(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def classifier(tensors: Tensors) -> Tensors:
    score = {"score.weight": tensors["lm_head.weight"][:1].clone()}
    return without("lm_head")(tensors) | score


def cut_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["lm_head.weight"][:-3].clone()}


def placeholders(tensors: Tensors) -> Tensors:
    return {name: tensor[:0].clone() for name, tensor in tensors.items()}


TIED = {"tie_word_embeddings": True}
CASES = {
    "compiled": Case(
        "https://github.com/pytorch/pytorch/issues/101107",
        under("_orig_mod."),
        (
            f"{ALL} of its {ALL} tensors",
            "model.embed_tokens.weight",
            "_orig_mod.model.embed_tokens.weight",
        ),
    ),
    "compiled and tied": Case(
        "https://github.com/pytorch/pytorch/issues/101107",
        lambda tensors: under("_orig_mod.")(without("lm_head")(tensors)),
        ("model.embed_tokens.weight", "_orig_mod."),
        TIED,
    ),
    "data parallel": Case(
        "https://github.com/FareedKhan-dev/train-llm-from-scratch/pull/37",
        under("module."),
        (f"{ALL} of its {ALL} tensors", "module.model.embed_tokens.weight"),
    ),
    "adapter not merged": Case(
        "https://github.com/verl-project/verl/issues/4761",
        lambda tensors: {
            name.replace("q_proj.weight", "q_proj.base_layer.weight"): tensor
            for name, tensor in tensors.items()
        },
        (
            f"3 of its {ALL} tensors",
            "model.layers.0.self_attn.q_proj.weight",
            "base_layer",
            "merge_and_unload",
        ),
    ),
    "half a save": Case(
        "https://github.com/axolotl-ai-cloud/axolotl/issues/1391",
        without("layers.1."),
        (f"{OF_A_BLOCK} of its {ALL} tensors", "model.layers.1."),
    ),
    "no head": Case(
        "https://github.com/huggingface/transformers/pull/44976",
        without("lm_head"),
        (f"1 of its {ALL} tensors", "lm_head.weight", "tie_word_embeddings"),
    ),
    "reward model": Case(
        "https://github.com/huggingface/trl",
        classifier,
        (f"1 of its {ALL} tensors", "lm_head.weight", "score.weight"),
    ),
    "another vocabulary": Case(
        "https://github.com/huggingface/transformers/issues/20082",
        cut_head,
        (
            "1 tensor of the checkpoint",
            f"lm_head.weight, {(SIZE - 3, 32)} in place of {(SIZE, 32)}",
        ),
    ),
    "placeholders of ZeRO-3": Case(
        "https://github.com/huggingface/transformers/issues/20082",
        placeholders,
        (f"{ALL} tensors of the checkpoint", "model.embed_tokens.weight", "zero_to_fp32.py"),
    ),
    "tied without a head": Case(
        "https://huggingface.co/Qwen/Qwen2.5-0.5B", without("lm_head"), (), TIED
    ),
    "more than the class takes": Case(
        "https://huggingface.co/deepseek-ai/DeepSeek-V3",
        lambda tensors: tensors | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)},
        (),
    ),
    "old buffers": Case(
        "https://huggingface.co/huggyllama/llama-7b",
        lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        (),
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole untied model of three blocks, with its tokenizer."""
    return saved(tmp_path_factory.mktemp("plain") / "model", llama(), pad=True)


def changed(plain: Path, folder: Path, case: Case) -> Path:
    """A copy of the whole model, with the tensors of the case."""
    shutil.copytree(plain, folder)
    save_file(
        case.tensors(load_file(plain / "model.safetensors")),
        folder / "model.safetensors",
        {"format": "pt"},
    )
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | dict(case.config)))
    return folder


def sentences_of(load: Callable[[], object], *, adapter: bool = False) -> list[str]:
    """What a load is told of; the sentence of one that fails."""
    sentences: list[str] = []
    try:
        with watched_loads(lambda _, sentence: sentences.append(sentence), adapter=adapter):
            load()
    except DispersionError as error:
        sentences.append(str(error))
    return sentences


@pytest.mark.parametrize("name", CASES)
def test_what_the_files_lack_is_told_and_what_the_class_makes_is_not(
    name: str, plain: Path, tmp_path: Path
) -> None:
    case = CASES[name]
    folder = changed(plain, tmp_path / "model", case)
    own = vars(PreTrainedModel)["from_pretrained"]
    sentences = sentences_of(lambda: AutoModelForCausalLM.from_pretrained(folder))
    assert len(sentences) == bool(case.parts)
    assert [part for part in case.parts if part not in sentences[0]] == []
    assert vars(PreTrainedModel)["from_pretrained"] is own


@pytest.mark.parametrize("name", ["compiled", "half a save", "another vocabulary"])
def test_a_race_refuses_them_where_it_loads(name: str, plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "model", CASES[name])
    with pytest.raises(DispersionError, match=CASES[name].parts[0]):
        seams.loaded_lm("hf", {"pretrained": str(folder)}, lambda _: None, device="cpu")


def test_the_laboratory_warns(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(plain, tmp_path / "model", CASES["half a save"])
    load_model(folder)
    assert f"warning: {folder}: {OF_A_BLOCK} of its {ALL} tensors" in capsys.readouterr().err
    load_model(plain)
    assert "warning" not in capsys.readouterr().err
    with pytest.raises(DispersionError, match="does not have the shape"):
        load_model(changed(plain, tmp_path / "cut", CASES["another vocabulary"]))


def test_a_picture_model_silent_on_tying_has_no_head(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/pull/44976: Qwen2.5-VL does not tie by default."""
    text = {"vocab_size": SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 32,
    }
    config = Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision)
    from transformers import Qwen2_5_VLForConditionalGeneration as Kind

    Kind(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    assert sentences_of(lambda: Kind.from_pretrained(file.parent)) == []
    save_file(without("lm_head")(load_file(file)), file, {"format": "pt"})
    settings = json.loads((file.parent / "config.json").read_text())
    settings.pop("tie_word_embeddings", None)
    settings["text_config"].pop("tie_word_embeddings", None)
    (file.parent / "config.json").write_text(json.dumps(settings))
    (sentence,) = sentences_of(lambda: Kind.from_pretrained(file.parent))
    assert "1 of its" in sentence
    assert "lm_head.weight" in sentence


REMOTE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OwnConfig(PretrainedConfig):
    model_type = "own"


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8)
        self.register_buffer("steps", torch.arange(8))
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, **_):
        return CausalLMOutput(logits=self.head(self.embed(input_ids)))
"""


def test_code_of_a_checkpoints_own_is_watched_and_may_make_its_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(REMOTE)
    names = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    tensors = {
        "embed.weight": torch.ones(8, 4),
        "head.weight": torch.ones(8, 4),
        "head.bias": torch.ones(8),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def load() -> object:
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

    assert sentences_of(load) == []  # `steps` is missing, and a buffer
    del tensors["head.bias"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (sentence,) = sentences_of(load)
    assert "1 of its 3 tensors" in sentence
    assert "head.bias" in sentence


def test_a_gguf_without_a_block_is_told_and_one_without_a_head_is_tied(
    plain: Path, tmp_path: Path
) -> None:
    """https://github.com/ggml-org/llama.cpp (convert_hf_to_gguf.py of half a download)."""
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for number, (part, several) in enumerate(
        (("nothing", 0), ("layers.1.", OF_A_BLOCK), ("lm_head", 0))
    ):
        file = tmp_path / f"{number}.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_block_count(3)
        writer.add_context_length(256)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(64)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(SIZE)
        for name, tensor in without(part)(load_file(plain / "model.safetensors")).items():
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

        def load(name: str = file.name) -> object:
            return AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=name)

        sentences = sentences_of(load)
        assert len(sentences) == bool(several)
        assert not several or f"{several} of its {ALL} tensors" in sentences[0]


# --- adapters ----------------------------------------------------------------------------------------------

ADAPTERS = {
    "whole": (lambda name: name, {}, ()),
    "with a head of its own": (lambda name: name, {"modules_to_save": ["lm_head"]}, ()),
    # https://github.com/huggingface/trl/issues/926
    "wrapped twice": (
        lambda name: name.replace("base_model.model.", "base_model.model.base_model.model."),
        {},
        ("none of the adapter's 12 tensors",),
    ),
    # https://github.com/huggingface/peft/issues/2412
    "of a model without a head": (
        lambda name: name.replace("base_model.model.model.", "base_model.model."),
        {},
        ("none of the adapter's 12 tensors", "layers.0.self_attn.q_proj"),
    ),
    "of a deeper base": (
        lambda name: name.replace("layers.1.", "layers.7."),
        {},
        ("4 tensors of the adapter belong to no module", "model.layers.7.self_attn.q_proj"),
    ),
    "half a save": (
        lambda name: "" if "layers.1." in name else name,
        {},
        ("4 tensors of the adapter are not in its file", "model.layers.1.self_attn.q_proj"),
    ),
}


def adapter(folder: Path, plain: Path, rename: Callable[[str], str], **settings: object) -> Path:
    """An adapter of the model as PEFT saves it, with renamed tensors; those without a name are left out."""
    base = AutoModelForCausalLM.from_pretrained(plain)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings
    )
    peft.get_peft_model(base, config).save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(file).items()}
    tensors.pop("", None)
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_that_does_not_fit_its_base_in_all_parts_is_refused(
    name: str, plain: Path, tmp_path: Path
) -> None:
    rename, settings, parts = ADAPTERS[name]
    folder = adapter(tmp_path / "adapter", plain, rename, **settings)
    given = {"pretrained": str(plain), "peft": str(folder)}
    if not parts:
        assert seams.loaded_lm("hf", given, lambda _: None, device="cpu").peft
        return
    with pytest.raises(HarnessError) as refusal:
        seams.loaded_lm("hf", given, lambda _: None, device="cpu")
    assert [part for part in parts if part not in str(refusal.value)] == []


def test_an_adapter_of_another_rank_than_it_says_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", plain, lambda name: name)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"r": 8}))
    with pytest.raises(DispersionError, match="12 tensors of the adapter do not have the shape"):
        seams.loaded_lm(
            "hf", {"pretrained": str(plain), "peft": str(folder)}, lambda _: None, device="cpu"
        )


def test_kinds_of_adapters_whose_tensors_are_no_modules_pass(plain: Path, tmp_path: Path) -> None:
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    bank = peft.VBLoRAConfig(num_vectors=8, vector_length=8, target_modules=["q_proj"])
    for number, config in enumerate((prompt, bank)):
        base = AutoModelForCausalLM.from_pretrained(plain)
        folder = tmp_path / str(number)
        peft.get_peft_model(base, config).save_pretrained(folder)

        def load(folder: Path = folder) -> object:
            base = AutoModelForCausalLM.from_pretrained(plain)
            return peft.PeftModel.from_pretrained(base, folder)

        assert sentences_of(load, adapter=True) == []


def test_an_adapter_beside_whole_weights_is_loaded_with_them_or_refused(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/huggingface/transformers/pull/43781"""
    made = {"whole": CASES["old buffers"], "compiled": CASES["compiled"]}
    folders = {name: changed(plain, tmp_path / name, case) for name, case in made.items()}
    folders["half"] = changed(plain, tmp_path / "half", CASES["old buffers"])
    for name, folder in folders.items():
        rename = ADAPTERS["half a save" if name == "half" else "whole"][0]
        for file in adapter(tmp_path / f"{name}-adapter", plain, rename).glob("adapter*"):
            shutil.copy(file, folder)

    def load(name: str) -> object:
        return seams.loaded_lm(
            "hf", {"pretrained": str(folders[name])}, lambda _: None, device="cpu"
        )

    load("whole")
    with pytest.raises(HarnessError, match=f"{ALL} of its {ALL} tensors"):
        load("compiled")
    with pytest.raises(HarnessError, match="4 tensors of the adapter are not in its file"):
        load("half")
    monkeypatch.setattr(adapters.transformers, "__version__", "4.57.0")
    with pytest.raises(HarnessError, match="holds whole weights and an adapter"):
        load("whole")
