"""Arguments that several commands share, among them the questions of a race, as declarations.

Neither torch nor lm-eval is imported for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lmeval_dispersion.arguments import Option
from lmeval_dispersion.options import JoinedByCommas, Once

ERROR = 0.05
MARGIN = 0.01


@dataclass(frozen=True, kw_only=True)
class LmEval:
    """Arguments of lm-eval for loading a model and asking it, under lm-eval's names.

    Attributes:
        model: Backend of lm-eval, such as hf or vllm.
        model_args: Further arguments of the backend.
        batch_size: Number of questions in a batch, or auto. Default: the backend's own.
        device: Where the model runs: cpu, cuda, cuda:1. Default: the backend's own.
        num_fewshot: Number of examples before each question. Default: the task's own.
        include_path: Folder with further tasks.
        apply_chat_template: Put questions in the model's chat template, or in the named one.
            Default: plain prompts.
        confirm_run_unsafe_code: Allow tasks to run the code that models write.
    """

    model: Annotated[str, Option("NAME")] = "hf"
    model_args: Annotated[str, Option("K=V,K=V")] = ""
    batch_size: Annotated[int | str | None, Option("N")] = None
    device: Annotated[str | None, Option("DEVICE")] = None
    num_fewshot: Annotated[int | None, Option("N")] = None
    include_path: Annotated[str | None, Option("FOLDER")] = None
    apply_chat_template: Annotated[bool | str, Option("NAME")] = False
    confirm_run_unsafe_code: bool = False

    @property
    def of_model(self) -> dict[str, int | str]:
        """Batch size and device by name, as far as given; they are not part of ``model_args``."""
        given = {"batch_size": self.batch_size, "device": self.device}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The metric by which answers are scored.

    Attributes:
        metric: Metric that scores a question, in all tasks or in TASK alone; separate several by
            commas, or repeat the option. Default: for each task, the first of acc, exact_match, …
            that it has.
    """

    metric: Annotated[str | None, Option("[TASK=][FILTER/]METRIC", action=JoinedByCommas)] = None


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """Where a model of transformers runs.

    Attributes:
        device: cpu, cuda, cuda:1, or auto to spread the model over all GPUs. Default: the first
            GPU, else the CPU.
    """

    device: Annotated[str | None, Option("DEVICE")] = None


@dataclass(frozen=True, kw_only=True)
class Loading(OnDevice):
    """How a model of transformers is loaded.

    Attributes:
        model_args: Arguments for loading, named as for lm-eval's hf model, such as
            dtype=bfloat16,revision=step1000; also load_in_4bit, load_in_8bit, peft,
            trust_remote_code.
    """

    model_args: Annotated[str, Option("K=V,K=V")] = ""


@dataclass(frozen=True, kw_only=True)
class TextColumn:
    """Which field of a file's or data set's records holds the text.

    Attributes:
        column: Field that holds the text in a record of a JSONL or parquet file or of a data set.
    """

    column: Annotated[str, Option("FIELD")] = "text"


@dataclass(frozen=True, kw_only=True)
class Questions(Judge):
    """The questions that checkpoints are asked, and the folder that keeps the answers.

    Attributes:
        tasks: Tasks and groups of lm-eval, or the file of a token set, which names its tasks.
            Default: those of the short list that `dispersion screen --emit` wrote.
        limit: Maximum number of questions that a checkpoint is asked, over all tasks. Default: all.
        weigh: What has equal weight in the mean over several tasks: units (each named task or
            group), or questions.
        output_path: Folder for all answers; the same command resumes from it, also with further
            checkpoints. Default: race-TASKS.
        seed: Seed of all random draws.
    """

    tasks: Annotated[str | None, Option("NAME,NAME", ("--task", "--tasks"), action=Once)] = None
    limit: Annotated[int | None, Option("N", least=1)] = None
    weigh: Literal["units", "questions"] = "units"
    output_path: Annotated[str | Path | None, Option("FOLDER", ("--output_path",))] = None
    seed: Annotated[int, Option("N", least=0)] = 0


@dataclass(frozen=True, kw_only=True)
class Asking(LmEval, Questions):
    """The questions and how they are asked: all arguments on which a model's answers depend."""
