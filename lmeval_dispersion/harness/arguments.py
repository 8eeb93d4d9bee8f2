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
    """All arguments of a store of texts.

    Attributes:
        model: Folder or Hub id of a decoder model.
        texts: Text, JSONL or parquet file, or a Hub data set.

            Of a text that exceeds the model's context the end counts.
        output: Folder of the store to write.
        layer: Layer to keep: last, norm, layer.K, layer.K.attn, layer.K.ffn; may be repeated.
            Default: last.
        tasks: Name of the data; a calibrator holds for one; with --from-samples only these tasks.
            Default: the file's; all.
    """

    model: Annotated[str, Option("MODEL")]
    texts: Annotated[str | Path, Option("FILE|HUB_ID")]
    output: Annotated[str | Path, Option("FOLDER", ("-o", "--output"))]
    _: KW_ONLY
    layer: Annotated[Sequence[str] | str, Option("LAYER")] = ()
    tasks: Annotated[str | None, Option("NAME,NAME", ("--task", "--tasks"), action=Once)] = None


@dataclass(frozen=True)
class AnswerTokens(TextColumn, OnDevice):
    """All arguments of a task's answer tokens.

    Attributes:
        tasks: lm-eval's tasks and groups.

            Their names with commas; None for a base with a file of prompts.
        base: Model that is run on prompts, a Hub id or folder, with @REVISION where it is not the
            main one. Default: count the task's answers.
        data: Prompts of the base: text, JSONL or parquet, or a Hub data set. Default: the task's.
        tokenizer: List the tokens of this model's tokenizer. Default: the base's.
        num_fewshot: Examples before a question of the base. Default: the task's own.
        include_path: A folder with more tasks.
        apply_chat_template: Prompts of the base in its chat template. Default: plain prompts.
    """

    tasks: Annotated[str | None, Option("NAME,NAME")] = None
    _: KW_ONLY
    base: Annotated[str | None, Option("MODEL")] = None
    data: Annotated[str | Path | None, Option("FILE|HUB_ID")] = None
    tokenizer: Annotated[str | None, Option("MODEL")] = None
    num_fewshot: Annotated[int | None, Option("N")] = None
    include_path: Annotated[str | None, Option("FOLDER")] = None
    apply_chat_template: Annotated[bool | str, Option("NAME")] = False
