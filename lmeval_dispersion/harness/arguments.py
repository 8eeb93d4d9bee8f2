"""What ``embed`` and ``tokens`` are asked: the declaration of the arguments; it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from lmeval_dispersion.arguments import Option
from lmeval_dispersion.options import Once


@dataclass(frozen=True)
class Embedding:
    """Arguments of ``dispersion embed`` for texts.

    Attributes:
        model: Hub id or folder of a decoder model.
        texts: Text, JSONL or parquet file, or a Hub data set. If a text exceeds the model's
            context, only its end is used.
        output: Folder of the store to write.
        layer: Layer to keep: last, norm, layer.K, layer.K.attn, layer.K.ffn; may be repeated.
            Default: last.
        tasks: Name for the data, since calibrators hold only for data of the same name; with
            --from-samples, only these tasks. Default: the file's name; all tasks.
        column: Field with the text, if records have several fields.
        model_args: Arguments as for lm-eval's hf model: dtype, load_in_4bit, load_in_8bit, peft,
            revision, trust_remote_code, such as dtype=bfloat16,revision=step1000.
        device: cpu, cuda, cuda:1, or auto to spread the model over all GPUs. Default: the first
            GPU, else the CPU.
    """

    model: str
    texts: str | Path
    output: str | Path
    _: KW_ONLY
    layer: Annotated[Sequence[str] | str, Option("LAYER")] = ()
    tasks: Annotated[str | None, Option("NAME,NAME", ("--task", "--tasks"), action=Once)] = None
    column: Annotated[str, Option("FIELD")] = "text"
    model_args: Annotated[str, Option("K=V,K=V")] = ""
    device: Annotated[str | None, Option("DEVICE")] = None


@dataclass(frozen=True)
class AnswerTokens:
    """Arguments of ``dispersion tokens``.

    Attributes:
        tasks: Names of lm-eval's tasks and groups, NAME,NAME.
        base: Base model to run on prompts: Hub id or folder, with @REVISION for another revision
            than main. Default: count the task's answers instead.
        data: Prompts for the base: text, JSONL or parquet file, or a Hub data set. Default: the
            task's questions.
        column: Field with the prompt, if records have several fields.
        tokenizer: Model whose tokenizer splits the answers into the tokens that are listed.
            Default: the base's.
        device: cpu, cuda, cuda:1, or auto to spread the base over all GPUs. Default: the first
            GPU, else the CPU.
        num_fewshot: Number of examples before each question. Default: the task's own.
        include_path: A folder with more tasks.
        apply_chat_template: Put prompts in the base's chat template. Default: plain prompts.
    """

    tasks: str | None = None
    _: KW_ONLY
    base: Annotated[str | None, Option("MODEL")] = None
    data: Annotated[str | Path | None, Option("FILE|HUB_ID")] = None
    column: Annotated[str, Option("FIELD")] = "text"
    tokenizer: Annotated[str | None, Option("MODEL")] = None
    device: Annotated[str | None, Option("DEVICE")] = None
    num_fewshot: Annotated[int | None, Option("N")] = None
    include_path: Annotated[str | None, Option("FOLDER")] = None
    apply_chat_template: Annotated[bool | str, Option("NAME")] = False
