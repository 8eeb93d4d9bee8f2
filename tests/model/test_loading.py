"""Loading: ready to run, or why not in one sentence; identity: all that changes the vectors changes it."""

import json
import os
import shutil
import sys

import pytest
import tiny_models
import torch

from lmeval_dispersion.errors import DispersionError, MissingExtraError, UsageError
from lmeval_dispersion.model.loading import (
    ModelChoice,
    adapter_identity,
    chosen_model,
    load_model,
    settings_identity,
    weights_identity,
)

CONFIGS = {
    "adapter": {"base_model_name_or_path": "org/base"},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "t5": {"model_type": "t5"},
    "odd": {"model_type": "no-such"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.saved(tmp_path_factory.mktemp("models") / "tiny-llama", tiny_models.llama())


def test_a_folder_loads_ready_to_run(folder):
    loaded = load_model(folder)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert (
        loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id
    )  # it was saved without one
    ids = torch.tensor([loaded.tokenizer("w1 w2").input_ids], device=loaded.device)
    expected = tiny_models.llama()(ids).logits
    assert torch.allclose(loaded.model(ids).logits, expected, atol=1e-5)
    half = load_model(folder, dtype="bfloat16")
    assert half.model.dtype == torch.bfloat16
    assert loaded.identity.keys() == {"weights", "dtype"}
    assert {**half.identity, "dtype": "float32"} == loaded.identity
    seen = set()
    for bits in ("4", "8"):
        loaded.model.config.quantization_config = {f"load_in_{bits}bit": True}
        seen.add(settings_identity(loaded.model)["quantization"])
    assert len(seen) == 2


def test_a_model_is_chosen_by_the_words_of_lm_eval(folder):
    given = (
        "dtype=float16, load_in_8bit=true,peft=org/lora,trust_remote_code=True,load_in_4bit=False"
    )
    expected = ModelChoice("org/m", "1000", "float16", "8bit", "org/lora", "cpu", True)
    assert chosen_model("org/m@1000", given, "cpu") == expected
    assert chosen_model("org/m", f"revision=1000,{given}", "cpu") == expected
    there = folder.rename(folder.with_name("tiny@llama"))
    assert chosen_model(str(there)) == ModelChoice(str(there))
    there.rename(folder)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("load_in_4bit=1", "expected load_in_4bit to be True or False, got '1'"),
        ("load_in_4bit=True,load_in_8bit=True", "expected load_in_4bit or load_in_8bit, got both"),
        ("=3", "model_args: expected K=V,K=V, got '=3'"),
        ("revision=1,revision=2", "model_args: expected each key once, got revision=1,revision=2"),
        ("layers=3", "model_args: expected only dtype, peft, revision, .*, got layers"),
    ],
)
def test_arguments_of_a_model_that_say_nothing_clear_are_refused(given, sentence):
    with pytest.raises(UsageError, match=sentence):
        chosen_model("org/m", given)
    with pytest.raises(UsageError, match=r"expected one revision of .*, got 1 and 2"):
        chosen_model("org/m@1", "revision=2")


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "tiny-llama",
            {"dtype": "int3"},
            UsageError,
            "auto, float32, float16, bfloat16, got 'int3'",
        ),
        # No name of a repository either: the Hub is not asked for it.
        (
            "tiny-llama",
            {"adapter": "no/such/adapter"},
            UsageError,
            "the adapter no/such/adapter cannot be loaded onto its base",
        ),
        (
            "tiny-llama",
            {"quantize": "4bit"},
            MissingExtraError,
            r"'lmeval-dispersion\[quantized\]'",
        ),
        pytest.param(
            *("tiny-llama", {"device": "cuda:0"}, UsageError, "'cuda:0' cannot be used"),
            marks=NO_CUDA,
        ),
        ("tiny-lama", {}, UsageError, "did you mean .*tiny-llama"),
        (".", {}, UsageError, "choose a folder in it, such as .*tiny-llama"),
        ("tiny-llama/config.json", {}, UsageError, "got the file .*config.json; give its folder"),
        (
            "adapter",
            {},
            UsageError,
            "expected a model, got the PEFT adapter .*; give its base model",
        ),
        ("bert", {}, UsageError, "expected a decoder-only language model"),
        ("t5", {}, UsageError, "expected a decoder-only language model"),
        ("no-weights", {}, DispersionError, "no-weights cannot be loaded: "),
        ("odd", {}, DispersionError, "odd cannot be loaded: "),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(folder, monkeypatch, name, options, error, message):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    place = folder.parent
    if name == "no-weights":
        shutil.copytree(folder, place / name)
        (place / name / "model.safetensors").unlink()
    elif name in CONFIGS:
        (place / name).mkdir()
        file = "adapter_config.json" if name == "adapter" else "config.json"
        (place / name / file).write_text(json.dumps(CONFIGS[name]))
    with pytest.raises(error, match=message):
        load_model(place / name, **options)


# peft asks transformers for it.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")
def test_an_adapter_changes_the_output_and_the_identity(folder, tmp_path):
    peft = pytest.importorskip("peft")
    ids, plain = torch.tensor([[5, 6, 7]]), load_model(folder)
    adapters = set()
    for seed in (1, 2):
        base = tiny_models.llama()
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        wrapped = peft.get_peft_model(base, config)
        wrapped.save_pretrained(tmp_path / f"adapter-{seed}")
        loaded = load_model(folder, adapter=tmp_path / f"adapter-{seed}")
        assert torch.allclose(loaded.model(ids).logits, wrapped.eval()(ids).logits, atol=1e-5)
        assert not torch.allclose(loaded.model(ids).logits, plain.model(ids).logits, atol=1e-3)
        adapters.add(digest := adapter_identity(tmp_path / f"adapter-{seed}"))
        assert loaded.identity == plain.identity | {"adapter": digest}
    assert len(adapters) == 2
    # transformers puts an adapter on the weights in its own folder.
    both = shutil.copytree(folder, tmp_path / "both")
    assert load_model(both).identity == plain.identity
    shutil.copytree(tmp_path / "adapter-1", both, dirs_exist_ok=True)
    joined = load_model(both)
    assert joined.identity != plain.identity
    assert not torch.allclose(joined.model(ids).logits, plain.model(ids).logits, atol=1e-3)


def test_what_the_hub_refuses_has_a_sentence_of_its_own(
    hub, folder, tmp_path, in_process, monkeypatch
):
    hub.add("org/gated", folder, gated=True)
    hub.add("org/old", folder)
    (tmp_path / "hf" / "hub" / "models--org--missinf").mkdir(parents=True)
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")

    def ask(_):
        for name, revision in (("org/missing", None), ("org/gated", None), ("org/old", "v9")):
            with pytest.raises(UsageError) as caught:
                load_model(name, revision=revision)
            print(caught.value)
        return 0

    missing, gated, old = in_process(endpoint=hub.endpoint, main=ask).stdout.splitlines()
    assert missing.startswith("there is no model org/missing on the Hub")
    assert missing.endswith("did you mean org/missinf?")
    assert gated.startswith("org/gated is gated; accept its conditions")
    assert old.startswith("org/old has no revision 'v9'")


def test_a_folder_is_its_weights_configuration_and_tokenizer_whatever_it_is_called(
    folder, tmp_path
):
    before = weights_identity(folder)
    assert before.startswith("sha256:")
    copy = tmp_path / "renamed"
    shutil.copytree(folder, copy)
    (copy / "optimizer.pt").write_bytes(b"state")
    (copy / "README.md").write_text("text")
    assert weights_identity(copy) == before
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        file = copy / name
        raw, about = file.read_bytes(), file.stat()
        # One bit: names, shapes and size are as they were. Trainers write a new file; a time that was put
        # back does not hide it.
        (tmp_path / "new").write_bytes(raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:])
        (tmp_path / "new").replace(file)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
        assert weights_identity(copy) != before, name
        file.write_bytes(raw)
    assert weights_identity(copy) == before


def test_two_ggufs_of_one_folder_and_two_commits_of_the_hub_differ(tmp_path):
    for name in ("a.Q4.gguf", "a.Q8.gguf"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    first, second = (weights_identity(tmp_path, gguf=name) for name in ("a.Q4.gguf", "a.Q8.gguf"))
    assert first is not None
    assert first != second
    assert weights_identity(tmp_path) is None  # which of them, nobody knows
    assert weights_identity("org/name", "a" * 40) == f"org/name@{'a' * 40}"
    assert weights_identity("org/name-that-is-not-cached", "main") is None
