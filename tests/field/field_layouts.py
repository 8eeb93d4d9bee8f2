"""Folders as programs leave them: runs, shards, caches, and what is no model."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as distributed
from field_case import Case, Cases, Expected
from field_files import write_shards
from tiny_checkpoints import WIDTH, right_of, save_tokenizer, tiny, write_config, write_weights
from tiny_gguf import write_gguf

LAYOUTS = Cases()


def leave_trainer_files(folder: Path, step: int) -> None:
    """The files that transformers' Trainer leaves in a checkpoint besides the model's."""
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    torch.save({"last_epoch": step}, folder / "scheduler.pt")
    torch.save({"python": 0}, folder / "rng_state.pth")
    torch.save({"learning_rate": 1e-5}, folder / "training_args.bin")
    state = {"global_step": step, "epoch": 1.0, "log_history": [], "best_model_checkpoint": None}
    (folder / "trainer_state.json").write_text(json.dumps(state))


@LAYOUTS.case("https://github.com/huggingface/transformers/issues/20082")
def final_bin_in_run(folder: Path) -> Expected:
    """A run saved with ``save_safetensors=False``: its final model is pytorch_model.bin."""
    run = folder / "run"
    values = {}
    for seed, name in ((1, "checkpoint-100"), (2, "checkpoint-200"), (3, "run")):
        place = run if name == "run" else run / name
        place.mkdir(parents=True, exist_ok=True)
        model = tiny(seed=seed)
        torch.save(model.state_dict(), place / "pytorch_model.bin")
        write_config(place, model)
        save_tokenizer(place)
        leave_trainer_files(place, 100 * seed)
        values[name] = right_of(model)
    return Expected(target="run", values=values)


def save(folder: Path, seed: int, *, tokenizer: bool = True) -> dict[str, float]:
    """A whole model by save_pretrained, and its right values."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny("llama", tied=False, seed=seed)
    model.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return right_of(model)


@LAYOUTS.case("https://github.com/axolotl-ai-cloud/axolotl/pull/1029")
def models_beside_the_steps(folder: Path) -> Expected:
    """A Trainer's output with merged/, final/, a merged step and a half-written one beside the steps."""
    values = {}
    names = (
        "checkpoint-1500",
        "checkpoint-1000",
        "checkpoint-10000",
        "checkpoint-1000-merged",
        "merged",
        "final",
    )
    for seed, name in enumerate(names):
        values[name] = save(folder / "out" / name, seed)
    for name in names[:3]:
        leave_trainer_files(folder / "out" / name, 1)
    half = folder / "out" / "checkpoint-12000"
    save(half, 7)
    whole = (half / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for name in ("runs", "logs", "notes"):
        (folder / "out" / name).mkdir()
    return Expected(
        target="out",
        values=values,
        refused={"checkpoint-12000": ("BadHeader", "save it again")},
        said=("Within one training run", "out/notes"),
        silent=("Evaluate first", "sha256", "upload", "out/runs", "out/logs"),
    )


@LAYOUTS.case("https://huggingface.co/docs/transformers/main_classes/trainer")
def trainer_without_tokenizer(folder: Path) -> Expected:
    """A Trainer without processing_class: the run's folder alone has the tokenizer."""
    values = {}
    for seed, name in enumerate(("checkpoint-100", "checkpoint-200"), start=1):
        values[name] = save(folder / "out" / name, seed, tokenizer=False)
    values["out"] = save(folder / "out", 3)
    return Expected(target="out", values=values)


@LAYOUTS.case("https://huggingface.co/docs/transformers/main_classes/trainer")
def step_without_tokenizer(folder: Path) -> Expected:
    """One checkpoint of such a run, named alone."""
    value = save(folder / "out" / "checkpoint-100", 1, tokenizer=False)
    save_tokenizer(folder / "out")
    return Expected(target="out/checkpoint-100", values={"checkpoint-100": value})


@LAYOUTS.case("https://docs.pytorch.org/torchtune/stable/deep_dives/checkpointer.html")
def torchtune_epochs(folder: Path) -> Expected:
    """torchtune's output: epochs, recipe_state and logs."""
    values = {}
    for seed, name in enumerate(("epoch_0", "epoch_1", "epoch_10", "epoch_2")):
        values[name] = save(folder / "out" / name, seed)
    for name, file in (("recipe_state", "recipe_state.pt"), ("logs", "log.txt")):
        (folder / "out" / name).mkdir()
        torch.save({}, folder / "out" / name / file)
    return Expected(
        target="out",
        values=values,
        said=("at epoch_", "Within one training run"),
        silent=("recipe_state",),
    )


# --- layouts that are refused, with the command that makes a model of them --------------------------------


@dataclass(frozen=True)
class Refused:
    """A layout of stand-ins: empty files of the right names.

    Attributes:
        name: Name of the case.
        source: Public address of its program's documentation or of a report.
        files: Paths below the case's folder.
        target: What the user names, below the case's folder.
        parts: Words of the refusal.
        label: Last part of the label; None for that of the target.
        config: Folders that have config.json and the tokenizer.
    """

    name: str
    source: str
    files: tuple[str, ...]
    target: str
    parts: tuple[str, ...]
    label: str | None = None
    config: tuple[str, ...] = ()

    def make(self, folder: Path) -> Expected:
        """Write the stand-ins."""
        for file in self.files:
            place = folder / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(b"x" * 64)
        for name in self.config:
            (folder / name).mkdir(parents=True, exist_ok=True)
            write_config(folder / name, tiny())
            save_tokenizer(folder / name)
        label = self.label or Path(self.target).name or folder.name
        # A run on this machine has no pull requests.
        return Expected(
            target=self.target, refused={label: self.parts}, silent=("refs/pr", "check the name")
        )


_TRAINER = (
    "rng_state_0.pth",
    "rng_state_1.pth",
    "scheduler.pt",
    "training_args.bin",
    "trainer_state.json",
)
REFUSED = (
    Refused(
        "deepspeed_zero3",
        "https://github.com/deepspeedai/DeepSpeed/issues/1394",
        (
            *(f"out/checkpoint-500/{name}" for name in (*_TRAINER, "zero_to_fp32.py", "latest")),
            "out/checkpoint-500/global_step500/zero_pp_rank_0_mp_rank_00_model_states.pt",
            "out/checkpoint-500/global_step500/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        ),
        "out",
        ("DeepSpeed", "python zero_to_fp32.py . OUT --safe_serialization", "out/checkpoint-500"),
        "checkpoint-500",
        ("out/checkpoint-500",),
    ),
    Refused(
        "deepspeed_step_alone",
        "https://www.deepspeed.ai/tutorials/zero/#extracting-weights",
        ("out/zero_to_fp32.py", "out/global_step7/mp_rank_00_model_states.pt"),
        "out/global_step7",
        ("DeepSpeed", "zero_to_fp32.py . OUT"),
    ),
    Refused(
        "verl_default",
        "https://github.com/verl-project/verl/issues/770",
        tuple(f"run/global_step_20/actor/model_world_size_2_rank_{rank}.pt" for rank in (0, 1)),
        "run",
        (
            "verl",
            "python -m verl.model_merger merge --backend fsdp --local_dir",
            "global_step_20/actor ",
        ),
        "huggingface",
        ("run/global_step_20/actor/huggingface",),
    ),
    Refused(
        "megatron_torch",
        "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/checkpointing.py",
        ("run/iter_0000500/mp_rank_00/model_optim_rng.pt", "run/latest_checkpointed_iteration.txt"),
        "run",
        ("Megatron", "convert_checkpoints.py export --hf-model"),
        "iter_0000500",
    ),
    Refused(
        "megatron_distributed",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/examples/conversion/convert_checkpoints.py",
        (
            "run/iter_0000500/common.pt",
            "run/iter_0000500/__0_0.distcp",
            "run/iter_0000500/.metadata",
        ),
        "run/iter_0000500",
        ("Megatron", "--megatron-path", "iter_0000500 --hf-path OUT"),
    ),
    Refused(
        "nemo2",
        "https://docs.nvidia.com/nemo-framework/user-guide/25.11/nemo-2.0/features/hf-integration.html",
        (
            "m/context/io.json",
            "m/context/model.yaml",
            "m/weights/__0_0.distcp",
            "m/weights/common.pt",
        ),
        "m",
        ("NeMo", "nemo llm export path="),
    ),
    Refused(
        "nemo_archive",
        "https://docs.nvidia.com/nemo-framework/user-guide/24.09/nemotoolkit/checkpoints/user_guide.html",
        ("m/llama.nemo",),
        "m",
        ("NeMo", "llama.nemo", "nemo llm export"),
    ),
    Refused(
        "mlx_adapters",
        "https://github.com/ml-explore/mlx-lm/issues/1119",
        (
            "adapters/adapters.safetensors",
            "adapters/0000100_adapters.safetensors",
            "adapters/adapter_config.json",
        ),
        "adapters",
        ("mlx-lm", "mlx_lm.fuse --model BASE --adapter-path"),
    ),
    Refused(
        "mistral_native",
        "https://github.com/unslothai/unsloth/issues/2652",
        ("m/consolidated.safetensors", "m/params.json", "m/tekken.json"),
        "m",
        ("Mistral's own layout", "convert_mistral_weights_to_hf.py"),
    ),
    Refused(
        "vllm_sharded_state",
        "https://github.com/vllm-project/vllm/blob/main/examples/offline_inference/save_sharded_state.py",
        tuple(f"m/model-rank-{rank}-part-0.safetensors" for rank in (0, 1)),
        "m",
        ("vLLM", "screen the model that it was made from"),
        config=("m",),
    ),
    Refused(
        "litgpt",
        "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/convert_lit_models.md",
        ("m/lit_model.pth", "m/model_config.yaml"),
        "m",
        ("LitGPT", "litgpt convert_from_litgpt"),
        config=("m",),
    ),
    Refused(
        "onnx",
        "https://huggingface.co/docs/optimum/onnxruntime/usage_guides/models",
        ("m/onnx/model.onnx", "m/onnx/model.onnx_data"),
        "m",
        ("ONNX", "screen the model that it was exported from"),
        config=("m",),
    ),
    Refused(
        "openvino",
        "https://github.com/huggingface/optimum-intel",
        ("m/openvino_model.bin", "m/openvino_model.xml"),
        "m",
        ("OpenVINO", "screen the model that it was exported from"),
        config=("m",),
    ),
    Refused(
        "core_ml",
        "https://github.com/huggingface/exporters",
        ("m/Model.mlpackage/Data/com.apple.CoreML/model.mlmodel",),
        "m",
        ("Core ML", "screen the model that it was exported from"),
    ),
    Refused(
        "nemo_rl",
        "https://docs.nvidia.com/nemo/rl/latest/design-docs/checkpointing.html",
        ("run/step_10/policy/weights/__0_0.distcp", "run/step_10/config.yaml"),
        "run",
        ("NeMo RL", "convert_dcp_to_hf.py", "--dcp-ckpt-path=", "policy/weights "),
        "step_10",
    ),
    Refused(
        "fsdp_full_state",
        "https://huggingface.co/docs/accelerate/usage_guides/fsdp",
        ("run/checkpoint_0/pytorch_model_fsdp.bin", "run/checkpoint_0/random_states_0.pkl"),
        "run",
        ("pytorch_model_fsdp.bin", "checkpoint_0/pytorch_model.bin`"),
        "checkpoint_0",
        ("run/checkpoint_0",),
    ),
    Refused(
        "meta_llama",
        "https://github.com/meta-llama/llama-models",
        ("m/consolidated.00.pth", "m/params.json", "m/tokenizer.model"),
        "m",
        ("Meta's own layout", "convert_llama_weights_to_hf.py"),
    ),
    Refused(
        "lightning",
        "https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html",
        ("m/lightning_logs/version_0/checkpoints/last.ckpt",),
        "m",
        ("Lightning", "save_pretrained"),
    ),
    Refused(
        "stopped_while_it_saved",
        "https://huggingface.co/docs/transformers/main_classes/trainer",
        tuple(f"out/checkpoint-9/{name}" for name in (*_TRAINER, "optimizer.pt")),
        "out",
        ("not saved to its end", "choose another step"),
        "checkpoint-9",
        ("out/checkpoint-9",),
    ),
)
LAYOUTS.extend(Case(refused.name, refused.source, refused.make) for refused in REFUSED)


@LAYOUTS.case("https://github.com/huggingface/accelerate/issues/2603")
def fsdp_sharded(folder: Path) -> Expected:
    """A Trainer's FSDP checkpoint with SHARDED_STATE_DICT, by torch's own distributed checkpoint."""
    place = folder / "out" / "checkpoint-100"
    place.mkdir(parents=True)
    model = tiny("llama", tied=False)
    state = {"model": model.state_dict()}
    distributed.save(state, checkpoint_id=str(place / "pytorch_model_fsdp_0"), no_dist=True)
    (place / "optimizer_0").mkdir()
    leave_trainer_files(place, 100)
    write_config(place, model)
    save_tokenizer(place)
    parts = ("FSDP", "accelerate merge-weights", "checkpoint-100/pytorch_model_fsdp_0 OUT")
    return Expected(target="out", refused={"checkpoint-100": parts}, silent=("refs/pr",))


@LAYOUTS.case("https://github.com/pytorch/torchtitan/blob/main/docs/checkpoint.md")
def distributed_checkpoint(folder: Path) -> Expected:
    """torchtitan's checkpoints: torch's distributed checkpoint alone."""
    model = tiny("llama", tied=False)
    distributed.save(
        model.state_dict(), checkpoint_id=str(folder / "checkpoint" / "step-10"), no_dist=True
    )
    parts = ("distributed checkpoint", "dcp_to_torch", "checkpoint/step-10 model.pt")
    return Expected(refused={"step-10": parts})


@LAYOUTS.case("https://github.com/huggingface/nanotron/blob/main/src/nanotron/serialize/weights.py")
def nanotron(folder: Path) -> Expected:
    """nanotron's checkpoints: one tensor a file, in folders by module."""
    model = tiny("llama")
    place = (
        folder / "checkpoints" / "10" / "model" / "model" / "token_position_embeddings" / "pp_block"
    )
    inner = place / "token_embedding"
    inner.mkdir(parents=True)
    file = inner / "model_weight_pp-rank-0-of-1_tp-rank-0-of-1.safetensors"
    write_weights(file, {"data": model.model.embed_tokens.weight}, {"version": "1.4"})
    (folder / "checkpoints" / "10" / "model_config.json").write_text("{}")
    (folder / "checkpoints" / "latest.txt").write_text("10")
    parts = ("nanotron", "convert_nanotron_to_hf.py", "checkpoints/10 ")
    return Expected(
        target="checkpoints", refused={"checkpoints": parts}, silent=("check the name",)
    )


@LAYOUTS.case("https://github.com/mistralai/mistral-finetune/issues/64")
def mistral_finetune(folder: Path) -> Expected:
    """mistral-finetune's run: LoRA weights in Mistral's names, without their base."""
    place = folder / "run" / "checkpoints" / "checkpoint_000100" / "consolidated"
    place.mkdir(parents=True)
    names = [
        f"layers.0.attention.{part}.lora_{side}.weight" for part in ("wq", "wv") for side in "AB"
    ]
    write_weights(place / "lora.safetensors", {name: torch.ones(4, WIDTH) for name in names})
    (place / "params.json").write_text(
        json.dumps({"dim": WIDTH, "lora": {"enable": True, "rank": 4}})
    )
    (place / "tokenizer.model.v3").write_bytes(b"x")
    parts = ("mistral-finetune", "utils.merge_lora", "consolidated/lora.safetensors")
    return Expected(target="run", refused={"consolidated": parts})


@LAYOUTS.case("https://huggingface.co/moonshotai/Kimi-K2-Instruct/tree/main")
def tiktoken_alone(folder: Path) -> Expected:
    """A tokenizer in tiktoken's form, with code of the repository's own."""
    save(folder, 1, tokenizer=False)
    (folder / "tiktoken.model").write_text("IQ== 0\n")
    (folder / "tokenization_kimi.py").write_text("")
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Expected(
        refused={folder.name: ("tiktoken.model", "--tokenizer", "convert_tiktoken_to_fast")}
    )


# --- layouts that are read, or whose models are named -----------------------------------------------------


@LAYOUTS.case("https://huggingface.co/docs/huggingface_hub/guides/manage-cache")
def hub_cache(folder: Path) -> Expected:
    """A Hub cache: links into blobs, an older snapshot, a data set, and a tokenizer alone."""
    hub = folder / "hub"
    values = {}
    for seed, name in enumerate(("org--model-a", "org--model-b", "gpt2"), start=1):
        repository = hub / f"models--{name}"
        commit = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
        last = name.rpartition("--")[2]
        values[last] = save(repository / "snapshots" / commit, seed)
        (repository / "blobs").mkdir()
        for file in (repository / "snapshots" / commit).iterdir():
            blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            file.rename(blob)
            file.symlink_to(os.path.relpath(blob, file.parent))
        save(repository / "snapshots" / ("0" * 40), 9)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    for name in ("datasets--org--questions", "models--org--tokenizer", ".locks"):
        (hub / name / "snapshots" / ("1" * 40)).mkdir(parents=True)
    save_tokenizer(hub / "models--org--tokenizer" / "snapshots" / ("1" * 40))
    (hub / "version.txt").write_text("1")
    said = ('"label": "org/model-a"', '"label": "gpt2"', "models--org--tokenizer")
    return Expected(target="hub", values=values, said=said, silent=("datasets--",))


@LAYOUTS.case("https://lmstudio.ai/docs/app/advanced/import-model")
def lm_studio(folder: Path) -> Expected:
    """LM Studio's folder of models: PUBLISHER/NAME/FILE.gguf, without config.json."""
    for seed, name in enumerate(
        ("lmstudio-community/Llama-3.2-1B-GGUF", "bartowski/Math-1B-GGUF"), start=1
    ):
        place = folder / "models" / name
        place.mkdir(parents=True)
        write_gguf(place / "m-F32.gguf", tiny("llama", tied=False, seed=seed))
    return Expected(target="models", refused={"models": ("folders of checkpoints", "models/*/*'")})


@LAYOUTS.case("https://github.com/hiyouga/LLaMA-Factory/blob/main/examples/README.md")
def llama_factory(folder: Path) -> Expected:
    """LLaMA-Factory's saves/MODEL/METHOD/STAGE."""
    for seed, name in enumerate(("Qwen2.5-0.5B/full/sft", "Llama-3.2-1B/full/dpo"), start=1):
        save(folder / "saves" / name / "checkpoint-10", seed)
    return Expected(target="saves", refused={"saves": ("folders of checkpoints", "saves/*/*/*'")})


def _ollama(folder: Path) -> tuple[Path, dict[str, float]]:
    """A store of Ollama's with one model: its blob, and its right values."""
    store = folder / "models"
    manifests = store / "manifests" / "registry.ollama.ai" / "library" / "llama3.2"
    manifests.mkdir(parents=True)
    (store / "blobs").mkdir()
    made = folder / "made.gguf"
    model = tiny("llama", tied=False, seed=1)
    write_gguf(made, model)
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    blob = store / "blobs" / f"sha256-{digest}"
    made.rename(blob)
    (store / "blobs" / f"sha256-{'0' * 64}").write_text("{{ .Prompt }}")
    kind = "application/vnd.ollama.image."
    layers = [
        {"mediaType": f"{kind}template", "digest": f"sha256:{'0' * 64}"},
        {"mediaType": f"{kind}model", "digest": f"sha256:{digest}"},
    ]
    (manifests / "1b").write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob, right_of(model)


@LAYOUTS.case("https://github.com/lyogavin/airllm/issues/304")
def ollama(folder: Path) -> Expected:
    """Ollama's folder of models: its sentence says which blob is which model."""
    blob, _ = _ollama(folder)
    return Expected(target="models", refused={"models": ("Ollama", "llama3.2:1b", blob.name)})


@LAYOUTS.case("https://github.com/lyogavin/airllm/issues/304")
def ollama_blob(folder: Path) -> Expected:
    """A blob by its own path."""
    blob, values = _ollama(folder)
    return Expected(target=str(blob.relative_to(folder)), values={blob.name: values})


# --- what downloads, clones and links leave ---------------------------------------------------------------


def _shards_without_the_last(folder: Path) -> None:
    """A sharded model whose second shard is missing."""
    save(folder, 1)
    model = tiny("llama", tied=False, seed=1)
    (folder / "model.safetensors").unlink()
    write_shards(folder, model.state_dict(), 2)
    (folder / "model-00002-of-00002.safetensors").unlink()


@LAYOUTS.case("https://huggingface.co/docs/huggingface_hub/guides/download")
def unfinished_local_download(folder: Path) -> Expected:
    """hf download --local-dir, stopped: a shard is missing, its part lies in .cache."""
    _shards_without_the_last(folder)
    cache = folder / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (cache / "a.incomplete").write_bytes(b"x")
    return Expected(
        refused={folder.name: ("BadIndex", "model-00002-of-00002.safetensors", "`hf download`")}
    )


@LAYOUTS.case("https://huggingface.co/docs/huggingface_hub/guides/manage-cache")
def unfinished_cached_download(folder: Path) -> Expected:
    """A Hub cache in which one shard is still incomplete."""
    repository = folder / "hub" / "models--org--name"
    _shards_without_the_last(repository / "snapshots" / ("a" * 40))
    (repository / "blobs").mkdir()
    (repository / "blobs" / "b.incomplete").write_bytes(b"x")
    return Expected(target="hub", refused={"name": ("BadIndex", "`hf download`")})


@LAYOUTS.case("https://huggingface.co/docs/transformers/big_models")
def shard_that_was_not_copied(folder: Path) -> Expected:
    """A shard is missing, and no loader takes the rest: not even where the head is there."""
    _shards_without_the_last(folder)
    return Expected(refused={folder.name: ("BadIndex", "model-00002-of-00002.safetensors")})


@LAYOUTS.case("https://github.com/git-lfs/git-lfs")
def clone_without_lfs(folder: Path) -> Expected:
    """A clone whose large files are still pointers of git-lfs (or of Xet, which writes the same)."""
    save(folder, 1)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456\n"
    (folder / "model.safetensors").write_text(pointer)
    return Expected(refused={folder.name: ("git-lfs pointer", "git lfs pull")})


@LAYOUTS.case("https://github.com/allenai/OLMo/blob/main/olmo/checkpoint.py")
def links_in_a_run(folder: Path) -> Expected:
    """A run with links to its steps (latest) counts each checkpoint once."""
    values = {}
    for seed, name in enumerate(("step-100", "step-200"), start=1):
        values[name] = save(folder / "out" / name, seed)
    os.symlink("step-200", folder / "out" / "latest")
    return Expected(target="out", values=values, silent=("out/latest", "a copy of"))


@LAYOUTS.case("https://github.com/axolotl-ai-cloud/axolotl/issues/1391")
def merged_in_a_folder_without_steps(folder: Path) -> Expected:
    """A training that saved no steps: the result, and merged/ in its folder."""
    values = {"merged": save(folder / "out" / "merged", 2), "out": save(folder / "out", 1)}
    save(folder / "out" / "text_encoder", 3)
    return Expected(target="out", values=values, silent=("Evaluate first", "text_encoder"))


@LAYOUTS.case("https://mlflow.org/docs/latest/ml/deep-learning/transformers/guide/")
def mlflow_folder(folder: Path) -> Expected:
    """A folder of MLflow's transformers flavor: model/ and components/tokenizer."""
    value = save(folder / "logged" / "model", 1, tokenizer=False)
    (folder / "logged" / "components" / "tokenizer").mkdir(parents=True)
    save_tokenizer(folder / "logged" / "components" / "tokenizer")
    (folder / "logged" / "MLmodel").write_text("flavors: {}")
    return Expected(target="logged", values={"model": value})


@LAYOUTS.case("https://huggingface.co/docs/diffusers/using-diffusers/loading#checkpoint-variants")
def variants_without_the_usual_file(folder: Path) -> Expected:
    """Two variants of one model, and no model.safetensors."""
    save(folder, 1)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.fp16.safetensors").write_bytes(whole)
    (folder / "model.safetensors").rename(folder / "model.fp32.safetensors")
    parts = ("2 safetensors files", "name the one that you mean", "model.fp16.safetensors")
    return Expected(refused={folder.name: parts}, silent=("upload",))


@LAYOUTS.case(
    "https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-output.html"
)
def archive(folder: Path) -> Expected:
    """SageMaker's output: an archive alone."""
    (folder / "model.tar.gz").write_bytes(b"x")
    return Expected(refused={folder.name: ("model.tar.gz", "tar -xf")})


@LAYOUTS.case("https://github.com/vllm-project/llm-compressor/pull/1434")
def compressor_stages(folder: Path) -> Expected:
    """llm-compressor's output: a folder for each stage."""
    values = {}
    for seed, name in enumerate(
        ("sparsity_stage", "finetuning_stage", "quantization_stage"), start=1
    ):
        values[name] = save(folder / "out" / name, seed)
        (folder / "out" / name / "recipe.yaml").write_text("{}")
    return Expected(target="out", values=values)
