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
    """All arguments of a store of texts.

    Attributes:
        model: Hub id or folder of a decoder model.
        texts: Text, JSONL or parquet file, or a Hub data set. Of a text that exceeds the model's
            context the end counts.
        output: Folder of the store to write.
        layer: Layer to keep: last, norm, layer.K, layer.K.attn, layer.K.ffn; may be repeated.
            Default: last.
        tasks: Name of the data; a calibrator holds for one; with --from-samples only these tasks.
            Default: the file's; all.
        column: Field with the text, where texts have fields.
        model_args: As of lm-eval's hf model: dtype, load_in_4bit, load_in_8bit, peft, revision,
            trust_remote_code, such as dtype=bfloat16,revision=step1000.
        device: cpu, cuda, cuda:1; auto spreads the model. Default: the first GPU, else the CPU.
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
    """All arguments of a task's answer tokens.

    Attributes:
        tasks: lm-eval's NAME,NAME of tasks and groups.
        base: Model that is run on prompts, a Hub id or folder, with @REVISION where it is not the
            main one. Default: count the task's answers.
        data: Prompts of the base: text, JSONL or parquet, or a Hub data set. Default: the task's.
        column: Field with the text, where prompts have fields.
        tokenizer: List the tokens of this model's tokenizer. Default: the base's.
        device: cpu, cuda, cuda:1; auto spreads the base. Default: the first GPU, else the CPU.
        num_fewshot: Examples before a question of the base. Default: the task's own.
        include_path: A folder with more tasks.
        apply_chat_template: Prompts of the base in its chat template. Default: plain prompts.
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
