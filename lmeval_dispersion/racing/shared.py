"""Probabilities in shared questions: of the right answer or, without labels, of answer tokens.

For multiple choice, lm-eval's samples hold the probability of the right answer. For a generated
answer the log-likelihood of the target after the prompt is measured. The probabilities of the
answer tokens, where the answer begins, need no labels: they order checkpoints by agreement with the
mean answer of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
from lmeval_screener.tokens.answers import first_known, resolve_answers
from lmeval_screener.tokens.sets import AnswerSet, load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from numpy.typing import NDArray

from lmeval_dispersion.errors import DispersionError, HarnessError, UsageError
from lmeval_dispersion.files import hashed
from lmeval_dispersion.harness.seams import log_likelihoods, right_choices
from lmeval_dispersion.racing.contest import Contest
from lmeval_dispersion.racing.evaluation import Evaluation, More
from lmeval_dispersion.racing.report import Agreed
from lmeval_dispersion.racing.rule import Array
from lmeval_dispersion.store.documents import right_probability

#: lm-eval's types of output whose questions are texts, without images and sound.
_KINDS = ("multiple_choice", "loglikelihood", "generate_until")
_TEXTS = 20  # answers that are tokenised to locate where an answer begins
FEWEST_CHECKPOINTS = 3  # whose mean answer is informative
FEWEST_QUESTIONS = 5


@dataclass(frozen=True)
class Question:
    """A question, and the requests that lm-eval makes for it.

    Attributes:
        kind: lm-eval's output type of the task.
        context: The prompt; empty if each choice has a prompt of its own.
        space: Text between the prompt and an answer.
        requests: One request for each choice or target.
        right: Indices of the requests with a right answer; empty if no right answer is known.
    """

    kind: str  # lm-eval's type of the task's output
    context: str  # empty if each choice has its own prompt
    space: str  # between prompt and answer
    requests: tuple[Any, ...]
    right: tuple[int, ...]  # empty without a label

    @property
    def generates(self) -> bool:
        """Whether the question's answers are generated texts, which have no log-likelihoods."""
        return self.kind == "generate_until"


# --- lm-eval's samples ---------------------------------------------------------------------------


def complete(
    evaluation: Evaluation,
    lm: Any,
    results: dict[str, Any],
    answers: AnswerSet | UsageError | None = None,
) -> None:
    """Add an entry ``block`` to lm-eval's samples, with probabilities that lm-eval does not give.

    Its key ``probability`` holds the probability of the right answer; of several right texts, that
    of the likeliest. The key is left out where the probability is unknown, or lm-eval's
    log-likelihoods of the choices give it. With ``answers``, the key ``tokens`` holds the
    probabilities of the answer tokens: of the choices if each is one token, and else of the tokens
    in ``answers``. If these probabilities are unavailable, the key ``why`` gives the reason
    instead. A sample without any of these keys gets no ``block``.

    Args:
        evaluation: The questions of the race.
        lm: lm-eval's model.
        results: lm-eval's results, whose samples are changed in place.
        answers: The task's answer tokens, or the error to report where they are needed and unknown;
            None to leave out ``tokens``.
    """
    samples = dict[tuple[str, int], list[dict[str, Any]]]()
    for name, of_task in results["samples"].items():
        for sample in of_task:  # one for each filter
            samples.setdefault((name, sample["doc_id"]), []).append(sample)
    questions = dict[tuple[str, int], Question]()
    for key in samples:
        task, requests = evaluation.requests_of(key)
        is_text = all(len(request.args) < 3 for request in requests)
        if task.OUTPUT_TYPE in _KINDS and is_text:
            questions[key] = question_of(task, requests, bool(evaluation.chat))
    likelihoods = _target_likelihoods(lm, list(questions.values()))
    place = None if answers is None else _AnswerPlace(lm, answers)
    for key, question in questions.items():
        number = len(question.requests)
        if question.generates:
            logs = [float(log) for log, _ in islice(likelihoods, number)]
        else:
            answered = samples[key][-1]["resps"]
            logs = [float(repeats[0][0]) for repeats in answered[:number]]
        block = dict[str, Any]()
        if not question.context or question.kind != "multiple_choice":
            probability = _probability(question, logs)
            if np.isfinite(probability):
                block["probability"] = probability
        if place:
            try:
                block["tokens"] = place.probabilities(question, logs)
            except DispersionError as error:
                block["why"] = str(error)
        if block:
            for sample in samples[key]:
                sample["block"] = block


def _target_likelihoods(lm: Any, questions: Sequence[Question]) -> Iterator[Any]:
    """Log-likelihood of each target of the questions that generate; NaN for a server of chats."""
    targets = list[Any]()
    for question in questions:
        if question.generates:
            targets += question.requests
    try:
        return iter(log_likelihoods(lm, targets))
    except NotImplementedError:
        return repeat((np.nan, False))


class _AnswerPlace:
    """Where a model's answers begin, and the answer tokens there."""

    def __init__(self, lm: Any, answers: AnswerSet | UsageError) -> None:
        self._lm = lm
        self._set = answers
        self._tokens: list[int] = []

    def probabilities(self, question: Question, logs: Sequence[float]) -> list[float]:
        """Probabilities of the answer tokens; DispersionError if unavailable."""
        lm = self._lm
        if getattr(lm, "backend", "causal") != "causal":
            raise HarnessError(
                "the model is an encoder-decoder, which does not write its answer as a "
                "continuation of the prompt"
            )
        if not hasattr(lm, "_encode_pair"):
            raise HarnessError("the backend gives no tokens")
        if not question.context:
            raise HarnessError("its choices have different prompts")
        is_each_one_token = question.kind == "multiple_choice"
        for request in question.requests:
            context, continuation = request.args[:2]
            _, tokens = lm._encode_pair(context, continuation)
            is_each_one_token = is_each_one_token and len(tokens) <= 1
        if not is_each_one_token:
            context, tokens = self._located(question)
            requests = [((question.context, ""), context, [token]) for token in tokens]
            answers = lm._loglikelihood_tokens(requests, disable_tqdm=True)
            logs = [log for log, _ in answers]
        probabilities: list[float] = np.exp(logs).tolist()
        return probabilities

    def _located(self, question: Question) -> tuple[list[int], list[int]]:
        """The tokens before the answer's place, and the answer tokens there.

        A common beginning of all answers, such as a space token, belongs to the prompt.
        """
        if isinstance(self._set, UsageError):
            raise self._set
        if not self._tokens:
            self._tokens = _answer_tokens(self._lm, self._set)
        answers = list[list[int]]()
        for text in [*self._set.answers][:_TEXTS] or [""]:
            answer = f"{question.space}{text.strip()}" or " "
            context, tokens = self._lm._encode_pair(question.context, answer)
            answers.append(tokens)
        beginning = list[int]()
        for column in zip(*answers, strict=False):
            if len(column) == 1 or len(set(column)) > 1:
                break
            beginning.append(column[0])
        tokens = [token for token in self._tokens if token not in beginning]
        return [*context, *beginning], tokens


def _answer_tokens(lm: Any, answers: AnswerSet) -> list[int]:
    core = getattr(lm.tokenizer, "backend_tokenizer", None)
    if core is None:
        raise HarnessError("the tokenizer has no tokenizer.json; save it as a fast tokenizer")
    vocabulary = Vocabulary.from_tokenizer_json(core.to_str().encode())
    everyday = load_token_set("reference", role="reference")
    tokens, *_ = resolve_answers(answers, vocabulary, everyday)
    return [token.id for token in tokens]


def question_of(task: Any, requests: Sequence[Any], chat: bool) -> Question:
    """Return the question that a document asks.

    Args:
        task: lm-eval's task.
        requests: The document's requests.
        chat: Whether a chat template is applied.
    """
    first = requests[0]
    kind = task.OUTPUT_TYPE
    context = first.args[0]
    glued = context[-1:].isspace() or (chat and not task.config.gen_prefix)
    space = "" if glued else task.config.target_delimiter
    if kind == "multiple_choice":
        # Mutual information asks each choice without its prompt as well.
        asked = tuple(request for request in requests if request.args[0]) or tuple(requests)
        contexts = {request.args[0] for request in asked}
        if len(contexts) > 1:
            context = ""
        right: tuple[int, ...] = ()
        if vars(task.config).get("process_results") is None:
            right = right_choices(task, first, len(asked))
        return Question(kind, context, space, asked, right)
    targets = [*requests]
    if kind == "generate_until":
        targets = []
        for text in _targets(task, first.doc):
            answer = text if text[0].isspace() else f"{space}{text}"
            target = replace(first, request_type="loglikelihood", arguments=(context, answer))
            targets.append(target)
    every_one = tuple(range(len(targets)))
    return Question(kind, context, space, tuple(targets), every_one)


def _targets(task: Any, doc: Any) -> list[str]:
    """The texts of a document's right answers; a target of code has tests instead."""
    if getattr(task.config, "unsafe_code", False):
        return []
    target = task.doc_to_target(doc)
    texts = target if isinstance(target, list) else [target]
    return [text for text in texts if isinstance(text, str) and text]


def _probability(question: Question, logs: Sequence[float]) -> float:
    """The probability of the right answer; NaN if unknown."""
    if not question.right or not np.isfinite(logs).any():
        return np.nan
    if question.kind == "multiple_choice":
        return right_probability(logs, question.right)
    return float(np.exp(max(logs)))


# --- an order without labels ---------------------------------------------------------------------


def asking_tokens(kept: dict[str, Any], path: Path, tasks: str) -> More:
    """Return a function that adds the probabilities of answer tokens to a race's samples.

    The tokens are those of the first task whose answer tokens are known. If none are known, the
    function handles only multiple-choice questions whose choices are single tokens; for others it
    adds the reason instead.

    Args:
        kept: Content of the folder's ``race.json``; a hash of the answer tokens is added to it.
        path: The folder.
        tasks: The race's tasks, ``NAME,NAME``.

    Raises:
        UsageError: The folder has the answers of a race with other answer tokens.
    """
    _, answers, refused = first_known(tasks)
    key = ""
    unknown = None
    if answers:
        key = hashed(repr(answers.answers))
    else:
        reason = str(refused[0]).partition(";")[0]
        unknown = UsageError(f"{reason}; as the task, name a file that `dispersion tokens` wrote")
    if kept.get("answers", key) != key:
        raise UsageError(
            f"{path} has the answers of a race with other answer tokens; name another folder",
            argument="tasks",
        )
    kept["answers"] = key
    return partial(complete, answers=answers or unknown)


def check_agreement(checkpoints: int, questions: int) -> None:
    """Check that checkpoints and questions are enough to order checkpoints by their agreement.

    Raises:
        UsageError: There are fewer than three checkpoints, or fewer than five questions for each.
    """
    if checkpoints < FEWEST_CHECKPOINTS or questions < FEWEST_QUESTIONS:
        raise UsageError(
            f"ordering by agreement needs at least {FEWEST_CHECKPOINTS} checkpoints and "
            f"{FEWEST_QUESTIONS} questions for each, got {checkpoints} and {questions}; name more "
            "checkpoints, or raise the budget",
            argument="budget",
        )


def agreed(evaluation: Evaluation, contest: Contest) -> dict[str, Agreed]:
    """Return the agreement of each checkpoint with the mean answer of all, by label.

    The agreement (see :func:`agreement`) is averaged over the first questions that all checkpoints
    were asked. The contest's ``reference`` is left out.

    Raises:
        UsageError: There are fewer than three checkpoints, or fewer than five such questions, or an
            answer has no probabilities of the answer tokens.
    """
    labels = [label for label in contest.answered if label != contest.reference]
    counts = [len(contest.answered[label].score) for label in labels]
    count = min(counts, default=0)
    check_agreement(len(labels), count)
    answers = list[list[Array]]()
    for label in labels:
        places = contest.order(label)[:count]
        answers.append(tokens_of(evaluation, label, places))
    agreements = dict[str, Agreed]()
    for label, values in zip(labels, agreement(answers), strict=True):
        mean = float(values.mean())
        deviation = float(values.std(ddof=1))
        agreements[label] = Agreed(mean, deviation / math.sqrt(count))
    return agreements


def tokens_of(evaluation: Evaluation, label: str, places: NDArray[np.int64]) -> list[Array]:
    """Return the probabilities that a checkpoint gave to the answer tokens of some questions.

    Args:
        evaluation: The questions of the race.
        label: Label of the checkpoint.
        places: Indices of the questions, shape (k,).

    Returns:
        For each of the k questions an array, float64, with one probability for each answer token.

    Raises:
        UsageError: A question was asked without these probabilities.
    """
    answers = list[Array]()
    for place in places:
        question = evaluation.questions[place]
        block = evaluation.blocks[label].get(question, {})
        if "tokens" not in block:
            why = block.get("why")
            step = "leave out this option to order the checkpoints by the right answers"
            if why is None:
                why = "the race asked it without answer tokens"
                step = "name another folder"
            raise UsageError(
                f"expected the probabilities of answer tokens, got a question of {question[0]} "
                f"without them ({why}); {step}",
                argument="answers",
            )
        answers.append(np.array(block["tokens"]))
    return answers


def agreement(answers: Sequence[Sequence[Array]]) -> list[Array]:
    """Return how well each checkpoint's answers agree with the mean answer of all checkpoints.

    The agreement on a question is the sum, over the answer tokens, of the checkpoint's probability
    times the token's probability in the mean answer. The mean answer is the mean over the
    checkpoints, after each one's probabilities were scaled to sum to 1.

    Args:
        answers: For each checkpoint and each question, the probabilities of the answer tokens. All
            checkpoints have the same questions.

    Returns:
        For each checkpoint an array of shape (questions,), float64.

    Raises:
        UsageError: The checkpoints have different numbers of answer tokens.
    """
    numbers_of_tokens = {tuple(map(len, of_one)) for of_one in answers}
    if len(numbers_of_tokens) > 1:
        raise UsageError(
            "expected checkpoints that share a tokenizer, got some with other answer tokens; "
            "leave out this option to order the checkpoints by the right answers",
            argument="answers",
        )
    values = np.zeros((len(answers), len(answers[0])))
    for question, of_all in enumerate(zip(*answers, strict=True)):
        scaled = [p / p.sum() for p in of_all]
        mean = np.mean(scaled, axis=0)
        values[:, question] = [p @ mean for p in of_all]
    return list(values)
