"""What ``embed`` and ``tokens`` are asked: the declaration of the arguments; it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from lmeval_dispersion.arguments import Option
from lmeval_dispersion.asking import Loading, OnDevice, TextColumn
from lmeval_dispersion.options import Once


@dataclass(frozen=True)
class Embedding(TextColumn, Loading):
    """Arguments of ``dispersion embed`` for texts.

    Attributes:
        model: Folder or Hub id of a decoder model.
        texts: Text, JSONL or parquet file, or a Hub data set.

            If a text exceeds the model's context, only its end is used.
        output: Folder of the store to write.
        layer: Layer whose states are stored: last, norm, layer.K, layer.K.attn, layer.K.ffn; may be
            repeated. Default: last.
        tasks: Name for the data, since a calibrator applies only to data of the same name; with
            --from-samples, the tasks to use. Default: the file's name, or all tasks.
    """

    model: Annotated[str, Option("MODEL")]
    texts: Annotated[str | Path, Option("FILE|HUB_ID")]
    output: Annotated[str | Path, Option("FOLDER", ("-o", "--output"))]
    _: KW_ONLY
    layer: Annotated[Sequence[str] | str, Option("LAYER")] = ()
    tasks: Annotated[str | None, Option("NAME,NAME", ("--task", "--tasks"), action=Once)] = None


@dataclass(frozen=True)
class AnswerTokens(TextColumn, OnDevice):
    """Arguments of ``dispersion tokens``.

    Attributes:
        tasks: Names of lm-eval's tasks and groups.

            They are separated by commas; None for a base with a file of prompts.
        base: Base model to run on prompts: Hub id or folder, with @REVISION for another revision
            than main. Default: count the task's answers instead.
        data: Prompts for the base: text, JSONL or parquet file, or a Hub data set. Default: the
            task's questions.
        tokenizer: Model whose tokenizer splits counted answers into tokens, which are shown in the
            first line. Default: show the answers as text.
        num_fewshot: Number of examples before each question. Default: the task's own.
        include_path: A folder with more tasks.
        apply_chat_template: Put prompts in the base's chat template. Default: plain prompts.
    """

    tasks: Annotated[str | None, Option("NAME,NAME")] = None
    _: KW_ONLY
    base: Annotated[str | None, Option("MODEL")] = None
    data: Annotated[str | Path | None, Option("FILE|HUB_ID")] = None
    tokenizer: Annotated[str | None, Option("MODEL")] = None
    num_fewshot: Annotated[int | None, Option("N")] = None
    include_path: Annotated[str | None, Option("FOLDER")] = None
    apply_chat_template: Annotated[bool | str, Option("NAME")] = False
