"""Layouts that programs leave behind: how each is seen, where its model is, and the command that makes one.

One table serves the refusals of folders without weights that can be read, and the reference in the docs. Each
command was checked against its program's own documentation, ``--help`` or source.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramLayout:
    """A layout of files.

    Attributes:
        program: The program, or several.
        signs: Names by which it is seen, for readers.
        model: Where its model is, for readers.
        step: What makes it readable, or how it is named; ``{folder}`` is the folder that holds the sign,
            ``{name}`` the file's name.
        seen: Regular expression of a path, relative to the checkpoint, that shows the layout; a group
            ``folder`` is the folder in question, where it is not the sign's own. Empty for a layout that is
            read as it is.
        reason: Why it cannot be read, as a clause.
        code: Error code of the refusal.
        next_to: Whether files in the folder above show it too.
    """

    program: str
    signs: str
    model: str
    step: str
    seen: str = ""
    reason: str = ""
    code: str = "NoSafetensors"
    next_to: bool = False


_EXPORTED = "screen the model that it was exported from, in safetensors or GGUF"
_MISTRAL = "transformers 4's script: `convert_mistral_weights_to_hf.py --input_dir MISTRAL --output_dir OUT`"
_BRIDGE = (
    "export them with Megatron-Bridge: `python examples/conversion/convert_checkpoints.py export --hf-model "
    "ORG/NAME --megatron-path {folder} --hf-path OUT`; then screen OUT"
)
_ALONE = "in the folder itself"

LAYOUTS = (
    # --- read as they are -----------------------------------------------------------------------------
    ProgramLayout(
        "Trainer, TRL, axolotl, unsloth",
        "`checkpoint-N`, `merged`, `final`",
        "each of them, and the folder itself",
        "`screen-checkpoints OUT`",
    ),
    ProgramLayout(
        "torchtune",
        "`epoch_N`, `recipe_state`, `logs`",
        "`epoch_N`",
        "`screen-checkpoints OUT`",
    ),
    ProgramLayout(
        "LLaMA-Factory",
        "`saves/MODEL/lora/sft`",
        "`saves/MODEL/METHOD/STAGE`",
        "`screen-checkpoints 'saves/*/*/*'`",
    ),
    ProgramLayout(
        "accelerate's `save_state`",
        "`model.safetensors`, `optimizer.bin`, `random_states_0.pkl`",
        "`model.safetensors`",
        "add config.json and the tokenizer, or `--tokenizer`: without config.json only G is known",
    ),
    ProgramLayout(
        "a Hub cache",
        "`models--ORG--NAME/snapshots/COMMIT`",
        "the snapshot of `refs/main`",
        "`screen-checkpoints ~/.cache/huggingface/hub`; data sets are left out",
    ),
    ProgramLayout(
        "LM Studio, ModelScope",
        "`models/PUBLISHER/NAME`",
        "`PUBLISHER/NAME`",
        "`screen-checkpoints 'models/*/*'`",
    ),
    ProgramLayout(
        "Ollama",
        "`manifests`, `blobs/sha256-…`",
        "a blob, in GGUF",
        "`screen-checkpoints blobs/sha256-…`; the folder's own sentence says which model each is",
    ),
    ProgramLayout(
        "mlx-lm (models)",
        "metadata `format: mlx` in `model.safetensors`",
        _ALONE,
        "`screen-checkpoints OUT`; packed matrices are refused",
    ),
    # --- refused, with the step that helps ------------------------------------------------------------
    ProgramLayout(
        "DeepSpeed ZeRO 1, 2, 3",
        "`zero_to_fp32.py`, `global_stepN/*_model_states.pt`",
        "in the shards of all processes",
        "join them: `cd {folder} && python zero_to_fp32.py . OUT --safe_serialization`; then put config.json "
        "and the tokenizer into OUT and screen it",
        r"(?P<folder>.*?)/?(?:zero_to_fp32\.py"
        r"|(?:global_step\d+/)?(?:[\w.-]*_)?mp_rank_\d+_(?:model|optim)_states\.pt)",
        "its weights are shards of DeepSpeed ZeRO ({path})",
        next_to=True,
    ),
    ProgramLayout(
        "FSDP with sharded states (Trainer, accelerate)",
        "`pytorch_model_fsdp_0/*.distcp`",
        "in the shards of all processes",
        "merge them: `accelerate merge-weights {folder} OUT`; then put config.json and the tokenizer into "
        "OUT and screen it",
        r"(?P<folder>(?:.*/)?pytorch_model_fsdp_\d+)/.*",
        "its weights are shards of FSDP, torch's distributed checkpoint ({path})",
    ),
    ProgramLayout(
        "FSDP with full states (accelerate)",
        "`pytorch_model_fsdp.bin`",
        "in that file, under another name than transformers'",
        "rename it: `mv {folder}/pytorch_model_fsdp.bin {folder}/pytorch_model.bin`",
        r"(?:.*/)?pytorch_model_fsdp\.bin",
        "its weights are in {path}, which transformers does not load",
    ),
    ProgramLayout(
        "verl",
        "`actor/model_world_size_N_rank_M.pt`; `actor/huggingface` holds only config and tokenizer",
        "in the shards of all processes",
        "merge them: `python -m verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir OUT`"
        "; then screen OUT",
        r"(?:.*/)?model_world_size_\d+_rank_\d+\.pt",
        "its weights are shards of verl ({path})",
        next_to=True,
    ),
    ProgramLayout(
        "NeMo",
        "`NAME.nemo`; `context/io.json`, `weights`",
        "in the archive, or in shards",
        "export it: `nemo llm export path={folder} output_path=OUT target=hf`; then screen OUT",
        r"(?:.*/)?[^/]+\.nemo|(?P<folder>.*?)/?context/(?:io\.json|model\.yaml)",
        "it is a checkpoint of NeMo ({path})",
    ),
    ProgramLayout(
        "Megatron-LM (torch)",
        "`iter_N/mp_rank_00/model_optim_rng.pt`",
        "in the shards of all processes",
        "save them anew with Megatron's `--ckpt-convert-format torch_dist --ckpt-convert-save DIST`, and "
        + _BRIDGE.replace("{folder}", "DIST/iter_N"),
        r"(?P<folder>.*?)/?mp_rank_\d+(?:_\d+)*/(?:model_optim_rng|model_rng|distrib_optim)\.pt",
        "its weights are shards of Megatron ({path})",
    ),
    ProgramLayout(
        "Megatron-LM, Megatron-Bridge (torch_dist)",
        "`iter_N/common.pt`, `*.distcp`",
        "in the shards of all processes",
        _BRIDGE,
        r"(?:.*/)?common\.pt",
        "its weights are shards of Megatron ({path})",
    ),
    ProgramLayout(
        "NeMo RL",
        "`step_N/policy/weights/*.distcp`",
        "in the shards of all processes",
        "convert them (NeMo RL): `uv run examples/converters/convert_dcp_to_hf.py --config=CONFIG "
        "--dcp-ckpt-path={folder} --hf-ckpt-path=OUT`; then screen OUT",
        r"(?P<folder>(?:.*/)?policy/weights)/[^/]*\.distcp",
        "its weights are shards of NeMo RL ({path})",
    ),
    ProgramLayout(
        "torch's distributed checkpoint (DCP; torchtitan, NeMo RL)",
        "`*.distcp`, `.metadata`",
        "in the shards of all processes",
        "join them: `python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} model.pt`; "
        "then save them with save_pretrained",
        r"(?:.*/)?[^/]*\.distcp",
        "its weights are shards of torch's distributed checkpoint (.distcp), which are not supported",
    ),
    ProgramLayout(
        "nanotron",
        "`model/…/pp_block/…/model_weight….safetensors`",
        "one tensor a file",
        "convert it with nanotron's script: `torchrun --nproc_per_node=1 "
        "examples/llama/convert_nanotron_to_hf.py --checkpoint_path={folder} --save_path=OUT`; screen OUT",
        r"(?P<folder>.*?)/?model/(?:.*/)?pp_block/(?:.*/)?model_weight[^/]*\.safetensors",
        "it is in nanotron's own layout ({path})",
    ),
    ProgramLayout(
        "mlx-lm (adapters)",
        "`adapters.safetensors`, `adapter_config.json` with `fine_tune_type`",
        "in its base, which adapter_config.json names as `model`",
        "fuse it: `mlx_lm.fuse --model BASE --adapter-path {folder} --save-path OUT`; then screen OUT",
        r"(?:.*/)?(?:\d+_)?adapters\.(?:safetensors|npz)",
        "it holds only an adapter of mlx-lm ({path})",
        "AdapterOnly",
    ),
    ProgramLayout(
        "mistral-finetune",
        "`consolidated/lora.safetensors`",
        "in its base, in Mistral's own layout",
        "merge it with mistral-finetune's script: `python -m utils.merge_lora --initial_model_ckpt "
        "BASE/consolidated.safetensors --lora_ckpt {folder}/lora.safetensors --dump_ckpt "
        "MISTRAL/consolidated.safetensors`; then convert that with " + _MISTRAL,
        r"(?:.*/)?lora\.safetensors",
        "it holds only a LoRA of mistral-finetune ({path})",
        "AdapterOnly",
    ),
    ProgramLayout(
        "Mistral's own layout",
        "`consolidated.safetensors`, `params.json`, `tekken.json`",
        "in other names than transformers'",
        "screen the same model in transformers' layout, or convert it with " + _MISTRAL,
        r"(?:.*/)?consolidated(?:[.-][\w-]+)?\.safetensors",
        "its weights are in Mistral's own layout ({path}), not in transformers'",
    ),
    ProgramLayout(
        "Meta's own layout",
        "`consolidated.00.pth`, `params.json`",
        "in other names than transformers'",
        "screen the same model in transformers' layout, or convert it with transformers 4's script: "
        "`convert_llama_weights_to_hf.py --input_dir {folder} --model_size SIZE --output_dir OUT`",
        r"(?:.*/)?consolidated\.\d+\.pth",
        "its weights are in Meta's own layout ({path}), not in transformers'",
    ),
    ProgramLayout(
        "vLLM's sharded state",
        "`model-rank-N-part-M.safetensors`",
        "in the slices of all processes",
        "screen the model that it was made from: vLLM has no way back",
        r"(?:.*/)?model-rank-\d+-part-\d+\.safetensors",
        "its weights are slices of vLLM's sharded state ({path})",
    ),
    ProgramLayout(
        "LitGPT",
        "`lit_model.pth`",
        "in a pickle of other names",
        "convert it: `litgpt convert_from_litgpt {folder} OUT`; then save OUT/model.pth with save_pretrained",
        r"(?:.*/)?lit_model\.pth",
        "its weights are in LitGPT's own layout ({path})",
    ),
    ProgramLayout(
        "PyTorch Lightning",
        "`lightning_logs/version_N/checkpoints/NAME.ckpt`",
        "in `state_dict`, under a common prefix",
        "take the model's tensors from its state_dict without their common prefix, and save them with "
        "save_pretrained",
        r"(?:.*/)?[^/]+\.ckpt",
        "it is a checkpoint of PyTorch Lightning ({path})",
    ),
    ProgramLayout(
        "ONNX",
        "`*.onnx`",
        "in a graph of operators",
        _EXPORTED,
        r"(?:.*/)?[^/]+\.onnx(?:_data)?",
        "it is a model of ONNX ({path})",
    ),
    ProgramLayout(
        "OpenVINO",
        "`openvino_model.xml`, `openvino_model.bin`",
        "in a graph of operators",
        _EXPORTED,
        r"(?:.*/)?openvino_[^/]*\.(?:xml|bin)",
        "it is a model of OpenVINO ({path})",
    ),
    ProgramLayout(
        "Core ML",
        "`*.mlpackage`, `*.mlmodel`",
        "in a graph of operators",
        _EXPORTED,
        r"(?:.*/)?[^/]+\.(?:mlpackage|mlmodelc)/.*|(?:.*/)?[^/]+\.mlmodel",
        "it is a model of Core ML ({path})",
    ),
    ProgramLayout(
        "SageMaker, and other archives",
        "`model.tar.gz`",
        "in the archive",
        "unpack it: `tar -xf {folder}/{name} -C {folder}`; then screen the folder",
        r"[^/]+\.(?:tar|tar\.gz|tar\.zst|tgz)",
        "its files are in an archive ({path})",
    ),
    ProgramLayout(
        "MLC LLM, TensorRT-LLM, LiteRT",
        "`params_shard_0.bin`; `rank0.engine`; `*.tflite`, `*.litertlm`",
        "compiled for one program",
        _EXPORTED,
        r"(?:.*/)?(?:params_shard_\d+\.bin|rank\d+\.engine|[^/]+\.(?:tflite|litertlm))",
        "it is compiled for another program ({path})",
    ),
)
#: A checkpoint of a training without its weights.
STOPPED = ProgramLayout(
    "any trainer, stopped while it saved",
    "`trainer_state.json`, `optimizer.pt`, `scheduler.pt`, `random_states_0.pkl` without weights",
    "nowhere",
    "wait until it is saved, or choose another step",
    r"(?:trainer_state\.json|(?:optimizer|scheduler)\.(?:pt|bin)|random_states_\d+\.pkl|rng_state\w*\.pth)",
    "it holds the state of a training ({path}) and no weights: it was not saved to its end",
)

SAVE_TOKENIZER = (
    "save it with `AutoTokenizer.from_pretrained(...).save_pretrained(...)` and screen that folder"
)
_STORED = "its tokenizer is stored only as {path}, and tokenizer.json, which maps tokens to rows, is missing"
#: Tokenizers without rows by piece, of weights that can be read.
TOKENIZERS = (
    ProgramLayout(
        "Mistral's tokenizer (tekken)",
        "`tekken.json` without `tokenizer.json`",
        _ALONE,
        "take tokenizer.json from the same model in transformers' layout",
        r"tekken\.json",
        _STORED,
    ),
    ProgramLayout(
        "tiktoken (Kimi, Qwen 1, GLM 4)",
        "`tiktoken.model`, `*.tiktoken` without `tokenizer.json`; `auto_map` in tokenizer_config.json",
        _ALONE,
        "make tokenizer.json of its encoding: `transformers.integrations.tiktoken.convert_tiktoken_to_fast`",
        r"tiktoken\.model|[^/]+\.tiktoken",
        _STORED,
    ),
    ProgramLayout(
        "SentencePiece",
        "`tokenizer.model` without `tokenizer.json`",
        _ALONE,
        SAVE_TOKENIZER,
        r"(?:tokenizer|spiece)\.model",
        _STORED,
    ),
)


def layout_of(
    paths: Iterable[str],
    place: str,
    layouts: Iterable[ProgramLayout] = LAYOUTS,
    *,
    is_local: bool = True,
) -> tuple[str, str, str] | None:
    """The refusal for a checkpoint without weights that can be read: code, reason and step; None if unknown.

    Args:
        paths: The checkpoint's files, relative to it; also those below it and next to it, where known.
        place: Its folder or address.
        layouts: The layouts that are looked for, in this order.
        is_local: Whether the files are on this machine; else a command of the step has them copied first.
    """
    known = sorted(paths, key=lambda path: (path.count("/"), path))
    inner = [path for path in known if not path.startswith("../")]
    for layout in layouts:
        if not layout.seen:
            continue
        pattern = re.compile(layout.seen)
        for path in known if layout.next_to else inner:
            if match := pattern.fullmatch(path):
                named = match.groupdict().get("folder")
                inside = posixpath.dirname(path) if named is None else named
                values = {
                    "folder": _joined(place, inside),
                    "path": path,
                    "name": posixpath.basename(path),
                }
                copied = ""
                if not is_local and "{folder}" in layout.step:
                    copied, values["folder"] = _copied(place, inside)
                step = f"{copied}{layout.step.format(**values)}"
                return layout.code, layout.reason.format(**values), step
    return None


def _copied(place: str, inside: str) -> tuple[str, str]:
    """The step that brings an address or a repository to this machine, and where ``inside`` is then."""
    if "://" in place:
        return f"copy {_joined(place, inside)} to FOLDER, and ", "FOLDER"
    return f"download it: `hf download {place} --local-dir FOLDER`; then ", _joined(
        "FOLDER", inside
    )


def _joined(place: str, inside: str) -> str:
    """A path below a folder or an address."""
    scheme, mark, rest = place.replace("\\", "/").rpartition("://")
    return f"{scheme}{mark}{posixpath.normpath(posixpath.join(rest, inside))}"


def rows() -> list[tuple[str, str, str, str]]:
    """The table for the docs: program, how it is seen, where the model is, command."""
    layouts = (*LAYOUTS, STOPPED, *TOKENIZERS)
    return [
        (row.program, row.signs, row.model, row.step.format(folder="FOLDER", name="FILE"))
        for row in layouts
    ]
