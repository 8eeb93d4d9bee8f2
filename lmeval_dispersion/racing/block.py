"""Probabilities of shared questions: of the right answer, and without labels of the answer tokens.

lm-eval's samples of multiple choice hold the right answer's. For a generated answer the target's
log-likelihood after the prompt is measured. The answer tokens' probabilities, where the answer begins, need
no labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from lmeval_screener.tokens.answers import resolve_answers
from lmeval_screener.tokens.sets import AnswerSet, load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary

from lmeval_dispersion.errors import DispersionError, HarnessError, UsageError
from lmeval_dispersion.harness.seams import log_likelihoods, right_choices
from lmeval_dispersion.store.documents import right_probability

if TYPE_CHECKING:
    from lmeval_dispersion.racing.evaluation import Evaluation

_KINDS = (
    "multiple_choice",
    "loglikelihood",
    "generate_until",
)  # on texts, without images and sound
_TEXTS = 20  # answers that are tokenised to locate where an answer begins


@dataclass(frozen=True)
class Question:
    """One question: a request per choice or target, and the indices of the right ones."""

    kind: str  # lm-eval's type of the task's output
    context: str  # empty if each choice has its own prompt
    space: str  # between prompt and answer
    requests: tuple[Any, ...]
    right: tuple[int, ...]  # empty without a label

    @property
    def generates(self) -> bool:
        """Whether its answers are generated texts, without log-likelihoods."""
        return self.kind == "generate_until"


def complete(
    evaluation: Evaluation,
    lm: Any,
    results: dict[str, Any],
    answers: AnswerSet | UsageError | None = None,
) -> None:
    """Add ``block`` to each of lm-eval's samples: probabilities that lm-eval does not give.

    ``probability`` is the right answer's (the most probable target's, if several), where lm-eval's choices
    do not give it. With ``answers``, ``tokens`` are the probabilities of the answer tokens: of the choices
    where each is one token, else of that set; or ``why`` gives the reason that there are none.
    """
    asked = {
        (task, sample["doc_id"]): sample
        for task, each in results["samples"].items()
        for sample in each
    }
    requests = {key: evaluation.requests_of(key) for key in asked}
    questions = {
        key: question_of(task, found, bool(evaluation.chat))
        for key, (task, found) in requests.items()
        if task.OUTPUT_TYPE in _KINDS and all(len(request.args) < 3 for request in found)
    }
    try:
        generated = [request for q in questions.values() if q.generates for request in q.requests]
        more = iter(log_likelihoods(lm, generated))
    except NotImplementedError:  # a server of chats
        more = repeat((np.nan, False))
    place = _AnswerPlace(lm, answers) if answers is not None else None
    for key, question in questions.items():
        given = more if question.generates else (answer[0] for answer in asked[key]["resps"])
        logs = [float(log) for log, _ in islice(given, len(question.requests))]
        block: dict[str, Any] = {}
        if not question.context or question.kind != "multiple_choice":
            probability = _probability(question, logs)
            block = {"probability": probability} if np.isfinite(probability) else {}
        if place:
            try:
                block["tokens"] = place.probabilities(question, logs)
            except DispersionError as error:
                block["why"] = str(error)
        for sample in results["samples"][key[0]] if block else ():
            if sample["doc_id"] == key[1]:  # each filter has a sample
                sample["block"] = block


class _AnswerPlace:
    """Where a model's answers begin, and the answer tokens there."""

    def __init__(self, lm: Any, answers: AnswerSet | UsageError) -> None:
        self._lm, self._set = lm, answers
        self._tokens: list[int] = []

    def probabilities(self, question: Question, logs: Sequence[float]) -> list[float]:
        """Probabilities of the answer tokens; DispersionError if unavailable."""
        lm = self._lm
        if getattr(lm, "backend", "causal") != "causal":
            raise HarnessError(
                "the model is an encoder-decoder, whose answers have a place of their own"
            )
        if not hasattr(lm, "_encode_pair") or not question.context:
            raise HarnessError(
                "its prompts do not end where an answer begins, or the backend has no tokens"
            )
        choices = [lm._encode_pair(*request.args[:2])[1] for request in question.requests]
        if question.kind != "multiple_choice" or any(len(choice) > 1 for choice in choices):
            context, tokens = self._found(question)
            requests = [((question.context, ""), context, [token]) for token in tokens]
            logs = [log for log, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]
        return [float(p) for p in np.exp(logs)]

    def _found(self, question: Question) -> tuple[list[int], list[int]]:
        """The tokens before the answer's place, and the answer tokens there.

        A common beginning of all answers, such as a space token, belongs to the prompt.
        """
        if isinstance(self._set, UsageError):
            raise self._set
        tokens = self._tokens = self._tokens or _answer_tokens(self._lm, self._set)
        texts = [
            f"{question.space}{text.strip()}" for text in [*self._set.answers][:_TEXTS] or [" "]
        ]
        pairs = [self._lm._encode_pair(question.context, text or " ") for text in texts]
        columns = zip(*(answer for _, answer in pairs), strict=False)
        shared = [
            same[0] for same in takewhile(lambda same: len({*same}) == 1 < len(same), columns)
        ]
        return [*pairs[0][0], *shared], [token for token in tokens if token not in shared]


def _answer_tokens(lm: Any, answers: AnswerSet) -> list[int]:
    core = getattr(lm.tokenizer, "backend_tokenizer", None)
    if core is None:
        raise HarnessError("the tokenizer has no tokenizer.json; save it as a fast one")
    vocabulary = Vocabulary.from_tokenizer_json(core.to_str().encode())
    everyday = load_token_set("reference", role="reference")
    return [token.id for token in resolve_answers(answers, vocabulary, everyday)[0]]


def question_of(task: Any, requests: Sequence[Any], chat: bool) -> Question:
    """The Question of one document, from its ``requests``."""
    first, kind = requests[0], task.OUTPUT_TYPE
    context = first.args[0]
    glued = context[-1:].isspace() or (chat and not task.config.gen_prefix)
    space = "" if glued else task.config.target_delimiter
    if kind == "multiple_choice":
        asked = tuple(r for r in requests if r.args[0]) or tuple(
            requests
        )  # without mutual information's
        several = len({request.args[0] for request in asked}) > 1
        scores_itself = vars(task.config).get("process_results") is not None
        right = () if scores_itself else right_choices(task, first, len(asked))
        return Question(kind, "" if several else context, space, asked, right)
    if kind != "generate_until":
        return Question(kind, context, space, tuple(requests), tuple(range(len(requests))))
    # A target of code has tests, not an answer.
    target = [] if getattr(task.config, "unsafe_code", False) else task.doc_to_target(first.doc)
    texts = [
        text for text in (target if isinstance(target, list) else [target]) if isinstance(text, str)
    ]
    texts = [text if text[0].isspace() else f"{space}{text}" for text in texts if text]
    asked = tuple(
        replace(first, request_type="loglikelihood", arguments=(context, text)) for text in texts
    )
    return Question(kind, context, space, asked, tuple(range(len(asked))))


def _probability(question: Question, logs: Sequence[float]) -> float:
    """The probability of the right answer; NaN if unknown."""
    if not question.right or not np.isfinite(logs).any():
        return np.nan
    if question.kind == "multiple_choice":
        return right_probability(logs, question.right)
    return float(np.exp(max(logs)))
