"""Stores with a known truth, for the tests of the audit."""

import numpy as np
import pandas as pd

from lmeval_dispersion.auditing.compare import dispersions
from lmeval_dispersion.auditing.paired import paired_scores
from lmeval_dispersion.geometry.centred import CentredVectors
from lmeval_dispersion.store import write_store


def documents(right, *, rng, subjects=6, confidence=0.0):
    """Documents answered right or wrong, with four-choice log-probabilities.

    ``confidence`` is how much higher the chosen answer's log-probability is for right answers.
    """
    n = len(right)
    logprobs = rng.normal(size=(n, 4)) - 3
    best = logprobs.argmax(axis=1)
    logprobs[np.arange(n), best] += confidence * np.asarray(right)
    return pd.DataFrame(
        {
            "doc_id": np.arange(n),
            "task": "synthetic",
            "subject": [f"subject {i % subjects}" for i in range(n)],
            "category": [f"category {i % subjects % 2}" for i in range(n)],
            "correct": np.asarray(right, dtype=float),
            "logprobs": list(logprobs),
            "query_perplexity": np.exp(rng.normal(2, 0.3, size=n)),
            "prompt_tokens": rng.integers(20, 200, size=n),
            "text": [f"question {i}" for i in range(n)],
        }
    )


def vectors(spread, *, rng, d=32):
    """Vectors around one direction; a document's distance to the others grows with its ``spread``."""
    spread = np.asarray(spread, dtype=float)
    direction = np.zeros(d)
    direction[0] = 1
    return direction + spread[:, None] * rng.normal(size=(len(spread), d)) / np.sqrt(d)


def written(path, frame, x, manifest=None):
    """The path, holding a store of one layer; ``manifest`` replaces what the manifest says."""
    says = {
        "model": "synthetic/model",
        "revision": "main",
        "tasks": {"synthetic": 1},
        "prompt_format": "p1",
        "num_fewshot": 0,
        "created": "2026-01-01T00:00:00+00:00",
    }
    write_store(path, documents=frame, vectors={"last": x}, manifest=says | (manifest or {}))
    return path


def sliced_store(
    path,
    *,
    effect=1.0,
    labelled=40,
    unlabelled=40,
    topics=0.0,
    shift=1.0,
    confidence=0.0,
    spread_of_accuracy=0.3,
    seed=0,
    manifest=None,
):
    """Slices of 30 to 60 documents whose accuracies differ: ``part`` says which are labelled.

    A slice tends to an accuracy drawn from 0.5 ± ``spread_of_accuracy``. Right answers have a spread of
    ``1 + effect`` times that of wrong ones. ``topics`` is by how much the spreads of whole slices differ
    (sd of the logarithm, over 10), and the length of a direction of their own. ``shift`` multiplies the
    spread of the unlabelled part.
    """
    rng = np.random.default_rng(seed)
    count = labelled + unlabelled
    sizes = rng.integers(30, 61, size=count)
    tends_to = 0.5 + spread_of_accuracy * rng.uniform(-1, 1, size=count)
    of = np.repeat(np.arange(count), sizes)
    right = rng.random(len(of)) < tends_to[of]
    spread = np.where(right, 1 + effect, 1.0) * np.exp(topics / 10 * rng.normal(size=count))[of]
    spread = spread * np.where(of < labelled, 1.0, shift)
    x = vectors(spread, rng=rng)
    x[:, 1:] += topics * rng.normal(size=(count, x.shape[1] - 1))[of] / np.sqrt(x.shape[1])
    names = [f"slice {i:03d}" for i in range(count)]
    frame = documents(right, rng=rng, confidence=confidence).assign(
        subject=[names[i] for i in of], part=np.where(of < labelled, "labelled", "unlabelled")
    )
    return written(path, frame, x, manifest)


def planted_store(
    path, n=3000, *, accuracy=0.5, effect=0.5, seed=0, d=32, manifest=None, **columns
):
    """Right answers have a spread that is ``1 + effect`` times that of wrong ones; 0 is pure noise."""
    rng = np.random.default_rng(seed)
    right = rng.random(n) < accuracy
    frame = documents(right, rng=rng).assign(**columns)
    x = vectors(np.where(right, 1 + effect, 1.0), rng=rng, d=d)
    return written(path, frame, x, manifest)


def subjects_store(
    path,
    *,
    subjects=10,
    each=100,
    law=0.0,
    between=0.0,
    luck=0.0,
    accuracy=0.5,
    tasks=1,
    seed=0,
    d=24,
    repeat=1,
    answer=None,
    **columns,
):
    """A store whose subjects have directions of their own, and whose truth is set apart by what is planted.

    Args:
        law: How much more spread right answers have than wrong ones, inside every subject.
        between: How much the subjects differ in spread, and in accuracy with it: Simpson's effect.
        luck: How much the subjects differ in accuracy only.
        tasks: Subjects belong to so many tasks in turn; `between` then sets tasks apart, not subjects.
        repeat: How many times every document is there.
        answer: What the model answers to everything; None for answers of all kinds.
    """
    rng = np.random.default_rng(seed)
    subject = np.repeat(np.arange(subjects), each)
    places = subject % tasks if tasks > 1 else subject
    level = (places / max(places.max(), 1)) - 0.5
    chance = np.clip(
        accuracy + between * level + luck * rng.normal(size=subjects)[subject], 0.005, 0.995
    )
    right = rng.random(len(subject)) < chance
    towards = rng.normal(size=(subjects, d)) / np.sqrt(d)
    spread = (1 + between * level) * np.where(right, 1 + law, 1.0)
    x = np.eye(1, d) * 1.5 + 0.5 * towards[subject]
    x = x + spread[:, None] * rng.normal(size=(len(subject), d)) / np.sqrt(d)
    frame = documents(right, rng=rng).assign(
        subject=[f"subject {i:02}" for i in subject],
        category=None,
        task=[f"task {i % tasks}" for i in subject],
    )
    given = np.full(len(subject), answer) if answer else rng.choice(list("ABCD"), size=len(subject))
    frame = frame.assign(
        prediction=given, target=np.where(right, given, np.char.add("not ", given))
    )
    frame = pd.concat([frame.assign(**columns)] * repeat, ignore_index=True)
    frame["doc_id"] = np.arange(len(frame))
    x = np.concatenate([x] * repeat)
    return written(path, frame, x, {"tasks": {f"task {i}": 1 for i in range(tasks)}})


def concluded(report):
    """All sentences of an audit's answer and of its conclusions, in one text."""
    sections = [
        section for section in report.document().sections if section.heading == "Conclusions"
    ]
    return " ".join(
        [*report.answer(), *(part.text for section in sections for part in section.parts)]
    )


def differences_of_equals(rng, n, *, d=32, spread=0.5, uneven=0.0, alike=0.5, share=0.5):
    """The intervals of a comparison of two runs on ``n`` documents that differ by chance alone.

    ``alike`` is how far runs answer and place documents alike, ``share`` the right answers', ``uneven`` the
    sd of the logarithm of documents' spreads.
    """
    same = rng.random(n) < alike
    first = (rng.random(n) < share).astype(float)
    second = np.where(same, first, rng.random(n) < share).astype(float)
    level = rng.random(n) * alike
    scores = [level + (1 - alike) * rng.random(n) for _ in "ab"]
    base, width = rng.normal(size=(n, d)), spread * np.exp(uneven * rng.normal(size=(n, 1)))
    contributions = []
    for _ in "ab":
        own = np.sqrt(alike) * base + np.sqrt(1 - alike) * rng.normal(size=(n, d))
        x = np.eye(1, d) + width * own / np.sqrt(d)
        unit = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
        contributions.append(CentredVectors(unit).contributions())
    found = {"answers": paired_scores(first, second), "scores": paired_scores(*scores)}
    bounds = {kind: (row.low, row.high) for kind, row in found.items()}
    vectors = dispersions(*contributions)
    return {**bounds, "vectors": (vectors["dispersion_low"], vectors["dispersion_high"])}
