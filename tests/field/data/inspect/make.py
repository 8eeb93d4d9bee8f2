"""Make the logs of this folder anew, by Inspect itself: ``python make.py`` where ``inspect_ai`` is installed.

Inspect's mock model answers. What no reader uses (events, usage) is cut out by Inspect's own reader and
writer, to keep the files small.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tiktoken


class Words:
    """Stands in for the tokenizer with which Inspect counts tokens: that one is downloaded."""

    def encode(self, text, **_):
        return text.split()

    encode_ordinary = encode


tiktoken.get_encoding = lambda *_, **__: Words()
tiktoken.encoding_for_model = tiktoken.get_encoding

from inspect_ai import Epochs, Task, eval, task  # noqa: E402
from inspect_ai.dataset import MemoryDataset, Sample  # noqa: E402
from inspect_ai.log import read_eval_log, write_eval_log  # noqa: E402
from inspect_ai.model import ModelOutput, get_model  # noqa: E402
from inspect_ai.scorer import CORRECT, PARTIAL, Score, accuracy, choice, match, mean, scorer, stderr  # noqa: E402
from inspect_ai.solver import generate, multiple_choice, solver, system_message  # noqa: E402

HERE = Path(__file__).parent


def number_in(text: str) -> int:
    """The first number of a question."""
    return int(text.split("+")[0].split()[-1])


def sums(count: int) -> MemoryDataset:
    """Sums whose names are texts."""
    samples = []
    for i in range(count):
        samples.append(Sample(id=f"sum-{i}", input=f"What is {i}+{i}?", target=str(2 * i)))
    return MemoryDataset(samples, name="sums")


@task(name="sums")
def sums_task(
    count: int = 50, reducers: str = "mean", epochs: int = 1, hint: str = "", version: int = 0
):
    """Sums that are right or wrong."""
    steps = [system_message(hint), generate()] if hint else [generate()]
    return Task(
        dataset=sums(count),
        solver=steps,
        scorer=match(),
        epochs=Epochs(epochs, reducers.split()),
        version=version,
    )


@scorer(metrics={"length": [mean(), stderr()], "parity": [accuracy(), stderr()]}, name="details")
def details():
    """Two scores of one answer."""

    async def score(state, target):
        text = state.output.completion
        return Score(
            value={"length": len(text), "parity": "C" if text.isdigit() else "I"}, answer=text
        )

    return score


@scorer(metrics=[accuracy(), stderr()], name="lenient")
def lenient():
    """Half for a wrong number, which `match` does not give; no score for the sum of twice 3."""

    async def score(state, target):
        if target.text == "6":
            return Score(value=float("nan"))
        text = state.output.completion
        value = CORRECT if text == target.text else PARTIAL if text.isdigit() else "N"
        return Score(value=value, answer=text)

    return score


@solver
def failing(numbers: tuple[int, ...]):
    """Ends in an error for some questions."""

    async def solve(state, generate):
        if number_in(state.input_text) in numbers:
            raise RuntimeError("the server was gone")
        return state

    return solve


@task(name="graded")
def graded_task(fails: str = ""):
    """Sums with three scorers, where some end in an error."""
    numbers = tuple(map(int, fails.split()))
    return Task(
        dataset=sums(12),
        solver=[failing(numbers), generate()],
        scorer=[match(), lenient(), details()],
    )


@task(name="larger")
def larger_task():
    """Choices, whose questions Inspect numbers."""
    samples = []
    for i in range(12):
        samples.append(
            Sample(
                input="Which one is larger than the other?",
                choices=[str(i), str(i + 1)],
                target="B",
                metadata={"subject": "odd" if i % 2 else "even"},
            )
        )
    return Task(
        dataset=MemoryDataset(samples, name="larger"),
        solver=[multiple_choice()],
        scorer=choice(),
        version=2,
    )


def answers(seed: int, skill: float, wrong: str = "no") -> Iterator[bool]:
    """A mock model's answers: right with a chance."""
    rng = random.Random(seed)

    def answer(messages, *_):
        text = str(messages[-1].content)
        right = rng.random() < skill
        if "larger" in text:
            return ModelOutput.from_content("mockllm/model", f"ANSWER: {'B' if right else 'A'}")
        number = 2 * number_in(text)
        return ModelOutput.from_content("mockllm/model", str(number) if right else wrong)

    return answer


def make(name: str, made: Task, model: str, seed: int, skill: float, **options) -> None:
    """Evaluate, and write the log to the file `name`."""
    file = HERE / name
    file.parent.mkdir(parents=True, exist_ok=True)
    wrong = options.pop("wrong", "no")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # not in a repository, whose address and commit Inspect would log
        asked = get_model(f"mockllm/{model}", custom_outputs=answers(seed, skill, wrong))
        (log,) = eval(
            made,
            model=asked,
            log_dir=folder,
            log_format=file.suffix[1:],
            display="none",
            max_connections=1,
            max_samples=1,
            **options,
        )
        log = read_eval_log(log.location)
        os.chdir(HERE)
    log.eval.task_file = None
    log.eval.packages = {"inspect_ai": log.eval.packages["inspect_ai"]}
    log.eval.model_args = {}
    if log.error:
        log.error.traceback = ""
        log.error.traceback_ansi = ""
    for sample in log.samples:
        sample.events = []
        sample.attachments = {}
        sample.store = {}
        sample.timelines = None
        sample.events_data = None
        sample.model_usage = {}
        sample.output.usage = None
        if sample.error:
            sample.error.traceback = ""
            sample.error.traceback_ansi = ""
    write_eval_log(log, file, format=file.suffix[1:])
    if file.suffix == ".json":
        content = json.loads(file.read_text("utf-8"))
        file.write_text(json.dumps(content, separators=(",", ":")), "utf-8")


def main() -> int:
    """Make all logs; the printed figures are Inspect's own."""
    for folder in HERE.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    make("base/sums.eval", sums_task(), "base", 1, 0.9)
    make("tuned/sums.eval", sums_task(), "tuned", 2, 0.6)
    epochs = {"count": 8, "epochs": 3, "reducers": "mean pass_at_2"}
    make("base-epochs/sums.json", sums_task(**epochs), "base", 3, 0.9)
    make("tuned-epochs/sums.json", sums_task(**epochs), "tuned", 4, 0.5)
    make(
        "other-prompts/sums.eval",
        sums_task(12, hint="Answer briefly.", version=1),
        "hinted",
        5,
        0.9,
    )
    for name, seed, skill, fails in (("base", 6, 0.8, "5 7"), ("tuned", 7, 0.5, "")):
        options = {"wrong": "1", "fail_on_error": False}
        make(f"{name}-tasks/graded.eval", graded_task(fails), name, seed, skill, **options)
        make(f"{name}-tasks/larger.eval", larger_task(), name, seed, skill)
    make("failed/graded.eval", graded_task("5"), "failed", 8, 0.9, fail_on_error=True)
    make("unscored/sums.eval", sums_task(12), "unscored", 9, 0.9, score=False)
    for file in sorted(HERE.rglob("*/*.*")):
        log = read_eval_log(str(file))
        figures = {}
        for each in log.results.scores if log.results else ():
            for key, metric in each.metrics.items():
                figures[f"{each.scorer}/{each.name}/{each.reducer}/{key}"] = metric.value
        print(file.relative_to(HERE), file.stat().st_size, log.status, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
