"""Questions of an lm-eval task, asked by the race's evaluation, and more that a probe asks of each.

Scores are lm-eval's own. Asked as well are the log-likelihood of the target where an answer is generated, and
the answer tokens' probabilities at the answer's place, which need no labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from lmeval_screener.tokens.answers import first_known, resolve_answers, tasks_in
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from numpy.typing import NDArray

from lmeval_dispersion.errors import DispersionError, HarnessError, UsageError
from lmeval_dispersion.harness.seams import log_likelihoods, logged_lines, right_choices
from lmeval_dispersion.racing.evaluation import Evaluation
from lmeval_dispersion.store.identity import SUFFIX
from lmeval_dispersion.store.samples import right_probability

Array = NDArray[np.float64]
_TEXTS = 20  # answers that locate where an answer begins


class Answered(NamedTuple):
    """A model's answers to n questions; NaN where unknown.

    Attributes:
        score: By lm-eval's metric; NaN without labels. Shape (n,).
        probability: Of the right answer. Among choices: the softmax of their log-likelihoods; else that of
            the target after the prompt, of several targets the most probable one's. Shape (n,).
        squares: Sum of squared probabilities, at the answer's place, of the answer tokens: the choices' where
            each is one token, else those that the task's answers consist of. Shape (n,).
        no_squares: Why squares are missing, one clause; else empty.
        answers: Probabilities of the answer tokens at each question's place; empty without squares.
    """

    score: Array
    probability: Array
    squares: Array
    no_squares: str = ""
    answers: tuple[Array, ...] = ()


@dataclass(frozen=True)
class Question:
    """One question: a request for each choice or target, and the indices of the right ones."""

    kind: str  # lm-eval's type of the task's output
    context: str  # empty if each choice has its own prompt
    space: str  # between prompt and answer
    requests: tuple[Any, ...]
    right: tuple[int, ...]  # empty without a label
    scored: bool  # whether the metric knows the right answer


class Questions:
    """Questions of a task or group, drawn at random, the same for every model.

    Args:
        name: lm-eval's ``NAME,NAME`` of tasks and groups, or ours, or a file of `dispersion tokens`.
        count: How many to draw; all there are where the task has fewer.
        answers: The set of answer tokens, by the name of a task or a file; None for the task's own.
        options: Those of :class:`Evaluation`, such as ``seed`` and ``num_fewshot``.

    Raises:
        UsageError: lm-eval has no such task, or the task no score for each question.
    """

    def __init__(self, name: str, count: int, *, answers: str | None = None, **options: Any) -> None:
        self.name = ",".join(task.removesuffix(SUFFIX) for task in tasks_in(name))
        self.evaluation = Evaluation(self.name, limit=count, **options)
        _, known, refused = first_known(answers or name)
        if answers and not known:
            raise refused[0]
        self._set = known or UsageError(
            f"{str(refused[0]).partition(';')[0]}; name a set of `dispersion tokens` as answers"
        )

    def __len__(self) -> int:
        return len(self.evaluation.questions)

    def ask(self, lm: Any, label: str = "") -> Answered:
        """The answers of a model of lm-eval, question by question as in ``evaluation.questions``.

        Raises:
            UsageError: Its backend gives no log-likelihoods, or the metric no scores.
        """
        evaluation = self.evaluation
        try:
            results = evaluation.ask(lm, range(len(self)))
            lines = logged_lines(results)
            found = evaluation.scores(label, evaluation.template_of(lm), lines, results["configs"])
            questions = self.built()
            logs = self._logs(lm, questions, results["samples"])
        except NotImplementedError as error:
            raise UsageError(
                f"a probe needs log-likelihoods, which {type(lm).__name__} does not give; use hf or vllm"
            ) from error
        score = np.where([question.scored for question in questions], found.score, np.nan)
        probability = np.array([_probability(*pair) for pair in zip(questions, logs, strict=True)])
        try:
            answers = self._answers(lm, questions, logs)
            squares = np.array([np.square(each).sum() for each in answers])
            return Answered(score, probability, squares, answers=answers)
        except DispersionError as error:
            return Answered(score, probability, np.full(len(self), np.nan), str(error))

    def built(self) -> list[Question]:
        """The questions, with the prompts that the model got that was asked last."""
        found = (self.evaluation.requests_of(place) for place in range(len(self)))
        return [_question(task, requests, bool(self.evaluation.chat)) for task, requests in found]

    def _logs(self, lm: Any, questions: Sequence[Question], samples: Any) -> list[list[float]]:
        """The log-likelihood of each choice or target; those of targets of generated answers are asked."""
        known = {
            (task, sample["doc_id"]): [answer[0] for answer in sample["resps"]]
            for task, of_task in samples.items()
            for sample in of_task
        }
        generated = [r for q in questions if q.kind == "generate_until" for r in q.requests]
        asked = iter(log_likelihoods(lm, generated))
        logs = []
        for question, place in zip(questions, self.evaluation.questions, strict=True):
            generates, count = question.kind == "generate_until", len(question.requests)
            pairs = [next(asked) for _ in range(count)] if generates else known[place][:count]
            logs.append([float(log) for log, _ in pairs])
        return logs

    def _answers(
        self, lm: Any, questions: Sequence[Question], logs: Sequence[Sequence[float]]
    ) -> tuple[Array, ...]:
        """Probabilities of the answer tokens, question by question; DispersionError if unavailable."""
        if not hasattr(lm, "_encode_pair") or not all(question.context for question in questions):
            raise HarnessError("its prompts do not end where an answer begins, or the backend has no tokens")
        values = []
        for question, known in zip(questions, logs, strict=True):
            choices = [lm._encode_pair(*request.args[:2])[1] for request in question.requests]
            if question.kind != "multiple_choice" or any(len(choice) > 1 for choice in choices):
                context, tokens = self._place(lm, question)
                requests = [((question.context, ""), context, [token]) for token in tokens]
                known = [log for log, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]
            values.append(np.exp(known))
        return tuple(values)

    def _place(self, lm: Any, question: Question) -> tuple[list[int], list[int]]:
        """The tokens before the answer's place, and the answer tokens there.

        A common beginning of all answers, such as a space token, belongs to the prompt.
        """
        if isinstance(self._set, UsageError):
            raise self._set
        core = getattr(lm.tokenizer, "backend_tokenizer", None)
        if core is None:
            raise HarnessError("the tokenizer has no tokenizer.json; save it as a fast one")
        vocabulary = Vocabulary.from_tokenizer_json(core.to_str().encode())
        everyday = load_token_set("reference", role="reference")
        tokens = [token.id for token in resolve_answers(self._set, vocabulary, everyday)[0]]
        texts = [f"{question.space}{text.strip()}" for text in [*self._set.answers][:_TEXTS] or [" "]]
        pairs = [lm._encode_pair(question.context, text or " ") for text in texts]
        columns = zip(*(answer for _, answer in pairs), strict=False)
        shared = [same[0] for same in takewhile(lambda same: len({*same}) == 1 < len(same), columns)]
        return [*pairs[0][0], *shared], [token for token in tokens if token not in shared]


def check_decoder(lm: Any) -> None:
    """Raise HarnessError for a model that is an encoder-decoder."""
    if getattr(lm, "backend", "causal") != "causal":
        raise HarnessError("a probe needs a decoder-only model, got an encoder-decoder; use lm_eval for it")


def _question(task: Any, requests: Sequence[Any], chat: bool) -> Question:
    first, kind = requests[0], task.OUTPUT_TYPE
    if any(len(request.args) > 2 for request in requests):
        raise UsageError(f"{task.task_name} has images or sound; a probe needs text questions")
    context = first.args[0]
    glued = context[-1:].isspace() or (chat and not task.config.gen_prefix)
    space = "" if glued else task.config.target_delimiter
    if kind == "multiple_choice":
        asked = tuple(r for r in requests if r.args[0]) or tuple(requests)  # without mutual information's
        several = len({request.args[0] for request in asked}) > 1
        right = right_choices(task, first, len(asked))
        return Question(kind, "" if several else context, space, asked, right, bool(right))
    if kind != "generate_until":
        return Question(kind, context, space, tuple(requests), tuple(range(len(requests))), True)
    code = bool(getattr(task.config, "unsafe_code", False))  # the target has tests, not an answer
    target = [] if code else task.doc_to_target(first.doc)
    texts = [text for text in (target if isinstance(target, list) else [target]) if isinstance(text, str)]
    texts = [text if text[0].isspace() else f"{space}{text}" for text in texts if text]
    asked = tuple(replace(first, request_type="loglikelihood", arguments=(context, text)) for text in texts)
    return Question(kind, context, space, asked, tuple(range(len(asked))), code or bool(asked))


def _probability(question: Question, logs: Sequence[float]) -> float:
    """The probability of the right answer."""
    if not question.right or not np.isfinite(logs).any():
        return np.nan
    if question.kind == "multiple_choice":
        return right_probability(logs, question.right)
    return float(np.exp(max(logs)))
