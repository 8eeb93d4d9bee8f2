"""A task's answer tokens: its documents' answers as texts, and the tokens that a base model expects.

Answers are counted as lm-eval places them after the prompt: every choice of a multiple choice, the target of
a generated answer as the task's regex extracts it, and for code each name, constant and literal of the
reference solution, once.
"""

from __future__ import annotations

import ast
import io
import keyword
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.filters.extraction import RegexFilter
from lm_eval.models.huggingface import HFLM
from numpy.typing import NDArray
from transformers import AutoTokenizer

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.harness.failures import sentences
from lmeval_dispersion.harness.seams import build_requests
from lmeval_dispersion.model.loading import LoadedModel

_SOLUTIONS = ("canonical_solution", "code")  # fields of reference solutions: HumanEval and similar, MBPP


def counted_answers(tasks: Sequence[Any]) -> tuple[Counter[str], int]:
    """The answers of all documents, with a leading space where the prompt needs one; number of documents.

    Raises:
        UsageError: A task has no answers (perplexity), or code without a reference solution.
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
                raise UsageError(f"{task.task_name} has no answers: it scores whole texts")
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
                f"got the fields {', '.join(doc)}"
            )
        before = str(doc.get("prompt", "")) if field == _SOLUTIONS[0] else ""
        yield from dict.fromkeys(words_of_code(before, doc[field]))
        return
    steps = [step for entry in task.config.filter_list or () for step in entry["filter"]]
    regex = next((step for step in steps if step["function"] == "regex"), None)
    targets = task.doc_to_target(doc)
    for target in targets if isinstance(targets, list) else [targets]:
        if not isinstance(target, str):
            raise UsageError(f"{task.task_name}: expected answers that are texts, got {target!r}")
        taken = None
        if regex:
            # lm-eval 0.5 keeps them apart.
            options = regex.get("kwargs") or {key: v for key, v in regex.items() if key != "function"}
            [[taken]] = RegexFilter(**options).apply([[target]], [doc])
        if taken and (at := target.rfind(taken)) >= 0:
            yield f"{' ' if target[:at].endswith(' ') else ''}{taken}"
        else:
            yield f"{task.config.target_delimiter}{target}"


def words_of_code(before: str, code: str) -> Iterator[str]:
    r"""Names, constants and literals of Python code that follows other code, with their leading spaces.

    Left out: keywords, operators, comments and f-strings, which Python's versions tokenise differently.

    >>> list(words_of_code("def f(x):\n", "    return x == None or x['key'] > 2\n"))
    [' x', ' None', ' x', 'key', ' 2']
    """
    inside = 0  # of f-strings
    for token in tokenize.generate_tokens(io.StringIO(before + code).readline):
        kind, text, (row, column) = tokenize.tok_name[token.type], token.string, token.start
        inside += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if inside or row <= before.count("\n"):
            continue
        space = " " if column and token.line[column - 1] == " " else ""
        if kind == "NUMBER" or (
            kind == "NAME" and (not keyword.iskeyword(text) or text in ("None", "True", "False"))
        ):
            yield space + text
        elif kind == "STRING" and "f" not in text[: text.index(text[-1])].lower():
            literal = ast.literal_eval(text)
            if isinstance(literal, str) and literal.strip():
                yield literal


def prompts_of(
    lm: HFLM, tasks: Sequence[Any], most: int, *, num_fewshot: int | None, apply_chat_template: bool
) -> list[list[int]]:
    """Up to ``most`` prompts of the tasks as tokens, as lm-eval runs them, without answers."""
    prompts: list[list[int]] = []
    for task in tasks:
        if getattr(task, "multiple_input", False):
            raise UsageError(f"{task.task_name}: its choices are part of the prompt; name another task")
        if num_fewshot is not None:
            task.set_config(key="num_fewshot", value=num_fewshot)
        task.set_fewshot_seed(seed=1234)  # lm-eval's default
        build_requests(
            task,
            limit=-(-most // len(tasks)),
            apply_chat_template=apply_chat_template,
            chat_template=lm.apply_chat_template if apply_chat_template else None,
            tokenizer_name=lm.tokenizer_name if apply_chat_template else "",
        )
        for instance in {instance.doc_id: instance for instance in task.instances}.values():
            prompts.append(lm.tok_encode(instance.args[0].rstrip(" ")))  # the answer's own, by its pieces
    return [prompts[i * len(prompts) // most] for i in range(most)] if len(prompts) > most else prompts


def tokenizer_of(name: str) -> Any:
    """The tokenizer of a model, by its Hub id or folder."""
    with sentences():
        return AutoTokenizer.from_pretrained(name)


def around(loaded: LoadedModel) -> HFLM:
    """lm-eval's wrapper around a loaded model."""
    return HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1)


@torch.inference_mode()
def mean_next(lm: HFLM, prompts: Sequence[list[int]]) -> NDArray[np.float64]:
    """Mean over the prompts of the next token's probability, (rows of the head,)."""
    total = torch.zeros((), dtype=torch.float64)
    for prompt in prompts:
        ids = torch.tensor([prompt[-lm.max_length :]], device=lm.device)
        total = total + torch.softmax(lm.model(ids).logits[0, -1].double().cpu(), -1)
    mean: NDArray[np.float64] = (total / len(prompts)).numpy()
    return mean
