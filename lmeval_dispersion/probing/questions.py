"""Questions of an lm-eval task: drawn and built once, then run on any model, block by block.

Task, prompts and requests are lm-eval's own, and so are the log-likelihoods: any backend with log-likelihoods
works.
"""

from __future__ import annotations

import inspect
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
from lmeval_dispersion.harness.seams import built_requests, drawn_questions, loaded_tasks, right_choices
from lmeval_dispersion.store.identity import SUFFIX
from lmeval_dispersion.store.samples import right_probability

Array = NDArray[np.float64]
_KINDS = ("multiple_choice", "loglikelihood", "generate_until")
_TEXTS = 20  # answers that locate where an answer begins


class Answered(NamedTuple):
    """A model's answers to n questions; NaN where unknown.

    Attributes:
        right: lm-eval's ``acc``; NaN without labels, and for generated answers. Shape (n,).
        probability: Of the right answer. Among choices: the softmax of their log-likelihoods; else that of
            the target after the prompt, of several targets the most probable one's. Shape (n,).
        squares: Sum of squared probabilities, at the answer's place, of the answer tokens: the choices' where
            each is one token, else those that the task's answers consist of. Shape (n,).
        no_squares: Why squares are missing, one clause; else empty.
        answers: Probabilities of the answer tokens at each question's place; empty without squares.
    """

    right: Array
    probability: Array
    squares: Array
    no_squares: str = ""
    answers: tuple[Array, ...] = ()


@dataclass(frozen=True)
class Question:
    """One document: its requests, a choice or target each, and the indices of the right ones."""

    task: str
    doc_id: int  # in the task's split
    kind: str  # lm-eval's type of the task's output
    context: str  # empty if each choice has its own prompt
    space: str  # between prompt and answer
    requests: tuple[Any, ...]
    right: tuple[int, ...]  # empty without a label


class Questions:
    """Documents of a task or group, drawn at random and in random order, the same for every model.

    Args:
        name: lm-eval's ``NAME,NAME`` of tasks and groups, or ours, or a file of `dispersion tokens`.
        count: How many to draw; all there are where the task has fewer.
        seed: Of the draw.
        num_fewshot: Examples before each question; None for the task's own number.
        include_path: A folder with more tasks.
        apply_chat_template: As lm-eval takes it; prompts are then built anew for another template.
        answers: The set of answer tokens, by the name of a task or a file; None for the task's own.

    Raises:
        UsageError: lm-eval has no such task, or it does not ask questions with text answers.
    """

    def __init__(
        self,
        name: str,
        count: int,
        *,
        seed: int = 0,
        num_fewshot: int | None = None,
        include_path: str | None = None,
        apply_chat_template: bool | str = False,
        answers: str | None = None,
    ) -> None:
        self.name, self.seed = ",".join(task.removesuffix(SUFFIX) for task in tasks_in(name)), seed
        self._tasks = loaded_tasks(self.name, num_fewshot, include_path)
        for task, loaded in self._tasks.items():
            if loaded.OUTPUT_TYPE not in _KINDS:
                raise UsageError(f"{task} asks no questions; expected {', '.join(_KINDS)}")
        self._places, self.of = drawn_questions(self._tasks, count, seed)
        self._chat = apply_chat_template
        self._built: tuple[Any, list[Question]] | None = None
        _, known, refused = first_known(answers or name)
        if answers and not known:
            raise refused[0]
        self._set = known or UsageError(
            f"{str(refused[0]).partition(';')[0]}; name a set of `dispersion tokens` as answers"
        )

    def __len__(self) -> int:
        return len(self._places)

    def ask(self, lm: Any, block: slice = slice(None)) -> Answered:
        """The answers of a model of lm-eval to a block of the questions.

        Raises:
            HarnessError: It is an encoder-decoder.
            UsageError: Its backend gives no log-likelihoods.
        """
        check_decoder(lm)
        questions = self.built(lm)[block]
        answers = iter(_log_likelihoods(lm, [r for question in questions for r in question.requests]))
        logs = [[next(answers) for _ in question.requests] for question in questions]
        scores = [_scores(question, pairs) for question, pairs in zip(questions, logs, strict=True)]
        right, probability = np.array(scores, dtype=np.float64).reshape(-1, 2).T
        try:
            found = self._answers(lm, questions, logs)
            squares = np.array([np.square(answers).sum() for answers in found])
            return Answered(right, probability, squares, answers=found)
        except DispersionError as error:
            return Answered(right, probability, np.full(len(questions), np.nan), str(error))

    def built(self, lm: Any) -> list[Question]:
        """The questions, with the prompts that this model gets."""
        template = lm.chat_template(self._chat) if self._chat else None
        if self._built is None or self._built[0] != template:
            documents: dict[str, list[int]] = {name: [] for name, _ in self._places}
            for name, doc_id in self._places:
                documents[name].append(doc_id)
            found = {
                (name, doc_id): _question(self._tasks[name], name, doc_id, requests, bool(self._chat))
                for name, chosen in documents.items()
                for doc_id, requests in built_requests(
                    self._tasks[name], chosen, lm if self._chat else None
                ).items()
            }
            self._built = template, [found[place] for place in self._places if place in found]
        return self._built[1]

    def _answers(
        self, lm: Any, questions: Sequence[Question], logs: Sequence[Sequence[tuple[float, bool]]]
    ) -> tuple[Array, ...]:
        """Probabilities of the answer tokens, question by question; DispersionError if unavailable."""
        if not hasattr(lm, "_encode_pair") or not all(question.context for question in questions):
            raise HarnessError("its prompts do not end where an answer begins, or the backend has no tokens")
        values = []
        for question, pairs in zip(questions, logs, strict=True):
            choices = [lm._encode_pair(*request.args[:2])[1] for request in question.requests]
            if question.kind != "multiple_choice" or any(len(choice) > 1 for choice in choices):
                context, tokens = self._place(lm, question)
                requests = [((question.context, ""), context, [token]) for token in tokens]
                pairs = lm._loglikelihood_tokens(requests, disable_tqdm=True)
            values.append(np.exp([log for log, _ in pairs]))
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


def _log_likelihoods(lm: Any, requests: list[Any]) -> list[tuple[float, bool]]:
    try:
        return list(lm.loglikelihood(requests, **_silent(lm.loglikelihood))) if requests else []
    except NotImplementedError as error:
        raise UsageError(
            f"a probe needs log-likelihoods, which {type(lm).__name__} does not give; use hf or vllm"
        ) from error


def _silent(method: Any) -> dict[str, bool]:
    """lm-eval's own option against its progress bars, where a backend has it."""
    return {"disable_tqdm": True} if "disable_tqdm" in inspect.signature(method).parameters else {}


def _question(task: Any, name: str, doc_id: int, requests: Sequence[Any], chat: bool) -> Question:
    first, kind = requests[0], task.OUTPUT_TYPE
    if any(len(request.args) > 2 for request in requests):
        raise UsageError(f"{name} has images or sound; a probe needs text questions")
    context = first.args[0]
    glued = context[-1:].isspace() or (chat and not task.config.gen_prefix)
    space = "" if glued else task.config.target_delimiter
    if kind == "multiple_choice":
        asked = [r for r in requests if r.args[0]] or requests  # without those of mutual information
        several = len({request.args[0] for request in asked}) > 1
        right = right_choices(task, first, len(asked))
        return Question(name, doc_id, kind, "" if several else context, space, tuple(asked), right)
    if kind == "generate_until":
        target = [] if getattr(task.config, "unsafe_code", False) else task.doc_to_target(first.doc)
        texts = [text for text in (target if isinstance(target, list) else [target]) if isinstance(text, str)]
        texts = [text if text[0].isspace() else f"{space}{text}" for text in texts if text]
        requests = [replace(first, request_type="loglikelihood", arguments=(context, text)) for text in texts]
    return Question(name, doc_id, kind, context, space, tuple(requests), tuple(range(len(requests))))


def _scores(question: Question, pairs: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """Whether the answer is right, and the probability of the right one."""
    logs = np.array([log for log, _ in pairs], dtype=np.float64)
    if not question.right or not np.isfinite(logs).any():
        return np.nan, np.nan
    if question.kind == "multiple_choice":
        probability = right_probability([log for log, _ in pairs], question.right)
        return float(int(logs.argmax()) in question.right), probability
    return float(pairs[0][1]) if question.kind == "loglikelihood" else np.nan, float(np.exp(logs.max()))
