"""A task's answer tokens, as a token set: the answers of its documents, or what a base model expects.

Answers are counted as lm-eval places them after the prompt: every choice of a multiple choice, the
target of a generated answer as the task's regex extracts it, and for code each name, constant and
literal of the reference solution, once.
"""

from __future__ import annotations

import ast
import io
import keyword
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lm_eval.filters.extraction import RegexFilter
from lm_eval.models.huggingface import HFLM
from lmeval_screener.tokens.answers import (
    COVERED,
    LEAST,
    check_answers,
    left_out_note,
    resolve_answers,
)
from lmeval_screener.tokens.sets import MOST, AnswerSet, load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from numpy.typing import NDArray
from transformers import AutoTokenizer

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.errors import UsageError, count
from lmeval_dispersion.files import write_whole
from lmeval_dispersion.harness.arguments import AnswerTokens
from lmeval_dispersion.harness.failures import sentences
from lmeval_dispersion.harness.seams import build_requests, loaded_tasks
from lmeval_dispersion.model.loading import chosen_model, loaded_model
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.store.identity import SUFFIX

MOST_PROMPTS = 100  # most prompts on which a base is run
_SHOWN = 12  # tokens in a set's first line
# Fields of reference solutions: HumanEval and similar, MBPP.
_SOLUTIONS = ("canonical_solution", "code")


@dataclass(frozen=True, repr=False)
class TaskTokens:
    """A set of answer tokens, as YAML that ``screen-checkpoints --task FILE`` reads.

    Attributes:
        head: One line that describes the set.
        text: The YAML, which begins with that line as a comment.
        note: A warning if more than half of the tokens in the answers are left out; "" otherwise, and
            without a tokenizer.
    """

    head: str
    text: str
    note: str

    def __repr__(self) -> str:
        return f"<{self.head}>"

    def save(self, path: str | Path) -> None:
        """Write the YAML to a file.

        Raises:
            DispersionError: The file cannot be written.
        """
        write_whole(Path(path), self.text.encode())


@takes(AnswerTokens)
def tokens(asked: AnswerTokens) -> TaskTokens:
    """Return the answer tokens of a task: counted in its documents, or predicted by a base model.

    A base model's answer tokens are those that it predicts after prompts, where answers begin.

    Raises:
        UsageError: The task does not exist or has no answers; both a task and a file of prompts are
            given, or neither; or a file of prompts is given without a base model.
        ScreeningError: The answers are running text, or give too few or too many tokens.
    """
    if bool(asked.tasks) == bool(asked.data) or (asked.data and not asked.base):
        got = "a file of prompts without a base model"
        if not asked.data:
            got = "neither a task nor prompts"
        elif asked.tasks:
            got = "both a task and a file of prompts"
        raise UsageError(
            "expected the name of a task, or a base model with either a task or a file of prompts, "
            f"got {got}"
        )
    if asked.base:
        return _expected(asked, asked.base)
    names = str(asked.tasks)
    tasks = loaded_tasks(names, include_path=asked.include_path)
    listing = None
    if asked.tokenizer is not None:
        with sentences():
            listing = AutoTokenizer.from_pretrained(asked.tokenizer)
    return answer_set(counted_set(names.removesuffix(SUFFIX), list(tasks.values())), listing)


def _expected(asked: AnswerTokens, base: str) -> TaskTokens:
    """The tokens that a base expects after the prompts of a task, or of a file."""
    texts: list[str] = []
    tasks: list[Any] = []
    if asked.tasks:
        tasks = list(loaded_tasks(asked.tasks, include_path=asked.include_path).values())
    else:
        source = Texts(str(asked.data), column=asked.column)
        texts = [text.text for text in islice(source, MOST_PROMPTS)]
        if not texts:
            raise UsageError(f"{asked.data} contains no text; check the file and the column")
    loaded = loaded_model(chosen_model(base, device=asked.device))
    lm = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1)
    if asked.tasks:
        name = asked.tasks.removesuffix(SUFFIX)
        prompts = prompts_of(
            lm,
            tasks,
            num_fewshot=asked.num_fewshot,
            apply_chat_template=bool(asked.apply_chat_template),
        )
        origin = f"questions of {asked.tasks}, {tasks[0].config.num_fewshot or 0}-shot"
    else:
        file = Path(str(asked.data)).name
        name = file.split(".")[0]
        prompts = []
        for text in texts:
            if asked.apply_chat_template:
                text = lm.apply_chat_template([{"role": "user", "content": text}])
            prompts.append(lm.tok_encode(text))
        origin = f"questions of {file}"
    if asked.apply_chat_template:
        origin += ", chat template"
    mean = mean_next(lm, prompts)
    ordered = np.argsort(-mean, kind="stable")
    count = int((np.cumsum(mean[ordered]) < COVERED).sum()) + 1
    ids = ordered[: max(LEAST, min(MOST, count))]
    pieces = loaded.tokenizer.convert_ids_to_tokens(ids.tolist())
    fields = {
        "name": name,
        "tasks": [name],
        "documents": len(prompts),
        "source": origin,
        "base": str(loaded.choice),
        "revision": loaded.identity.get("weights"),
        "tokenizer": Vocabulary.of(loaded.tokenizer).digest,
        "coverage": round(float(mean[ids].sum()), 4),
        "pieces": [piece for piece in pieces if piece is not None],  # padding rows have no piece
    }
    return answer_set(fields, loaded.tokenizer)


def counted_set(name: str, tasks: list[Any]) -> dict[str, Any]:
    """Count the answers of tasks, and return a token set as a dict of the fields of its YAML.

    The most frequent answers come first. ``name`` is the name of the set.

    Raises:
        ScreeningError: The answers are running text.
        UsageError: The tasks have no answers.
    """
    answers, documents = counted_answers(tasks)
    check_answers(name, answers)
    config = tasks[0].config
    source = [config.dataset_path]
    if len(tasks) == 1 and config.dataset_name:
        source.append(config.dataset_name)
    revision = f"lm-eval {version('lm_eval')}"
    if tasks[0].VERSION != "Yaml":  # lm-eval's word for none
        revision = f"task version {tasks[0].VERSION}, {revision}"
    return {
        "name": name,
        "tasks": list(dict.fromkeys([name, *(task.task_name for task in tasks)])),
        "documents": documents,
        "source": " ".join(map(str, filter(None, source))),
        "revision": revision,
        "answers": dict(sorted(answers.items(), key=lambda item: (-item[1], item[0]))),
    }


def answer_set(fields: Mapping[str, Any], tokenizer: Any = None) -> TaskTokens:
    """Return a token set as YAML, whose first line shows up to 12 of its answers or tokens.

    Args:
        fields: Fields of the YAML, such as those that :func:`counted_set` returns.
        tokenizer: A tokenizer of transformers, to show the tokens into which it splits the answers;
            None to show the answers themselves.

    Raises:
        ScreeningError: The tokenizer splits the answers into too few or too many tokens.
    """
    name = fields["name"]
    answers = fields.get("answers") or {}
    note = ""
    shown = [text.strip()[:24] for text in answers]
    documents = count(fields.get("documents", 0), "document")
    head = f"{name}: {count(len(answers), 'distinct answer')} in {documents}"
    if "refused" in fields:
        head = f"{name} has no answer tokens: {fields['refused']}"
    if tokenizer is not None:
        known = ("answers", "pieces", "tokenizer", "base")
        answer_set = AnswerSet(name, (), **{key: fields[key] for key in known if key in fields})
        everyday = load_token_set("reference", "reference")
        tokens, share = resolve_answers(answer_set, Vocabulary.of(tokenizer), everyday)
        note = left_out_note(name, share)
        shown = [token.text for token in tokens]
        folder = Path(tokenizer.name_or_path).name
        head = f"{name}: {len(tokens)} answer tokens in {folder}'s tokenizer"
    if shown:
        texts = []
        for text in shown[:_SHOWN]:
            texts.append(" ".join(repr(text)[1:-1].split()).replace("\\\\", "\\"))
        more = ", …" if len(shown) > _SHOWN else ""
        head += f": {', '.join(texts)}{more}"
    content = {"schema": 1, "name": name, "role": "answers", **fields}
    body = yaml.safe_dump(
        content, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None
    )
    return TaskTokens(head, f"# {head}\n{body}", note)


def counted_answers(tasks: Sequence[Any]) -> tuple[Counter[str], int]:
    """Count the answers of some tasks; return the counts and the number of documents.

    For a multiple-choice question, all choices are counted; for a task with generated answers, the
    target, as the task's regex extracts it; for code, each name, constant and literal of the
    reference solution, once. An answer keeps the space before it.

    Raises:
        UsageError: A task has no answers because it scores whole texts, has answers that are not
            texts, or has code without a reference solution.
    """
    answers: Counter[str] = Counter()
    documents = 0
    for task in tasks:
        shots = task.config.num_fewshot
        task.set_config(key="num_fewshot", value=0)
        build_requests(task)
        task.set_config(key="num_fewshot", value=shots)
        for instance in task.instances:
            if task.OUTPUT_TYPE == "loglikelihood_rolling":
                raise UsageError(
                    f"{task.task_name} has no answers, as it scores whole texts; name another task"
                )
            if task.OUTPUT_TYPE == "generate_until":
                answers.update(_generated(task, instance.doc))
            else:
                answers[instance.args[1]] += 1
        documents += len({instance.doc_id for instance in task.instances})
    return answers, documents


def _generated(task: Any, doc: Mapping[str, Any]) -> Iterator[str]:
    """A document's right answers, as a model should write them."""
    if task.config.unsafe_code:
        field = next((name for name in _SOLUTIONS if isinstance(doc.get(name), str)), None)
        if field is None:
            raise UsageError(
                f"{task.task_name}: expected reference solutions in a field {' or '.join(_SOLUTIONS)}, "
                f"got documents with the fields {', '.join(doc)}; name another task"
            )
        before = str(doc.get("prompt", "")) if field == _SOLUTIONS[0] else ""
        yield from dict.fromkeys(words_of_code(before, doc[field]))
        return
    regex = _regex(task)
    targets = task.doc_to_target(doc)
    for target in targets if isinstance(targets, list) else [targets]:
        if not isinstance(target, str):
            raise UsageError(
                f"{task.task_name}: expected answers that are texts, got {target!r}; name another task"
            )
        [[taken]] = regex.apply([[target]], [doc]) if regex else [[None]]
        place = target.rfind(taken) if taken else -1
        if place < 0:
            yield f"{task.config.target_delimiter}{target}"
        else:
            space = " " if target[:place].endswith(" ") else ""
            yield f"{space}{taken}"


def _regex(task: Any) -> RegexFilter | None:
    """The first expression by which a task's filters take the answer out of a text."""
    for entry in task.config.filter_list or ():
        for step in entry["filter"]:
            if step["function"] == "regex":
                options = {key: value for key, value in step.items() if key != "function"}
                return RegexFilter(**options.pop("kwargs", options))  # 0.5 keeps them apart
    return None


def words_of_code(before: str, code: str) -> Iterator[str]:
    r"""Yield the names, constants and literals of Python code, with the spaces before them.

    Keywords, operators and comments are left out, and so are f-strings, which Python versions
    tokenise differently. ``before`` is the code that ``code`` continues.

    >>> list(words_of_code("def f(x):\n", "    return x == None or x['key'] > 2\n"))
    [' x', ' None', ' x', 'key', ' 2']
    """
    inside = 0  # number of open f-strings
    for token in tokenize.generate_tokens(io.StringIO(before + code).readline):
        kind = tokenize.tok_name[token.type]
        text = token.string
        row, column = token.start
        inside += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if inside or row <= before.count("\n"):
            continue
        space = " " if column and token.line[column - 1] == " " else ""
        is_name = not keyword.iskeyword(text) or text in ("None", "True", "False")
        if kind == "NUMBER" or (kind == "NAME" and is_name):
            yield space + text
        elif kind == "STRING" and "f" not in text[: text.index(text[-1])].lower():
            literal = ast.literal_eval(text)
            if isinstance(literal, str) and literal.strip():
                yield literal


def prompts_of(
    lm: HFLM, tasks: Sequence[Any], *, num_fewshot: int | None, apply_chat_template: bool
) -> list[list[int]]:
    """Return up to 100 prompts of some tasks, without answers, each as a list of token ids.

    Args:
        lm: lm-eval's transformers model, which tokenises the prompts.
        tasks: lm-eval's tasks.
        num_fewshot: Number of examples in a prompt; None for each task's own number.
        apply_chat_template: Whether prompts are in the model's chat template.

    Raises:
        UsageError: The choices of a task are part of its prompts.
    """
    prompts: list[list[int]] = []
    for task in tasks:
        if getattr(task, "multiple_input", False):
            raise UsageError(
                f"the choices of {task.task_name} are part of its prompts, so no answer follows a "
                "prompt; name another task"
            )
        if num_fewshot is not None:
            task.set_config(key="num_fewshot", value=num_fewshot)
        task.set_fewshot_seed(seed=1234)  # lm-eval's default
        build_requests(
            task,
            limit=-(-MOST_PROMPTS // len(tasks)),
            apply_chat_template=apply_chat_template,
            chat_template=lm.apply_chat_template if apply_chat_template else None,
            tokenizer_name=lm.tokenizer_name if apply_chat_template else "",
        )
        for instance in {instance.doc_id: instance for instance in task.instances}.values():
            # The answer's pieces have the space.
            prompts.append(lm.tok_encode(instance.args[0].rstrip(" ")))
    if len(prompts) <= MOST_PROMPTS:
        return prompts
    return [prompts[i * len(prompts) // MOST_PROMPTS] for i in range(MOST_PROMPTS)]


@torch.inference_mode()
def mean_next(lm: HFLM, prompts: Sequence[list[int]]) -> NDArray[np.float64]:
    """Return each token's probability of following a prompt, averaged over the prompts.

    Shape (v,), float64, where v is the number of rows of the output projection.
    """
    total = torch.zeros((), dtype=torch.float64)
    for prompt in prompts:
        ids = torch.tensor([prompt[-lm.max_length :]], device=lm.device)
        total = total + torch.softmax(lm.model(ids).logits[0, -1].double().cpu(), -1)
    mean: NDArray[np.float64] = (total / len(prompts)).numpy()
    return mean
