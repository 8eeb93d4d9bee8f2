"""What siblings.yaml keeps of a checkpoint: its answers, probabilities over T, and the ratio of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lmeval_screener.figures import gap, ratio
from lmeval_screener.weights.projection import FinalNorm
from numpy.typing import NDArray

from benchmarks.validity import records, texts
from benchmarks.validity.decoder import Decoder
from benchmarks.validity.questions import Question, batches, endings_read, programs_run
from benchmarks.validity.texts import DOMAINS

Rows = NDArray[Any]
BLOCK = 25  # questions at whose places the probabilities of all answer tokens are kept
GLUE = {"math": "", "legal": " ", "code": " "}  # between a prompt and its answer


class Answers:
    """The tokens of answers, of everyday words, and the questions, as ids of a study's tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        asked: Mapping[str, Mapping[str, list[Question]]],
        references: Mapping[str, str] = texts.REGISTERED,
    ) -> None:
        def spaced(words: list[str]) -> list[int]:
            ids = [tokenizer.token_to_id(f"Ġ{word}") for word in words]
            return [i for i in ids if i is not None]

        self.tokenizer, self.asked = tokenizer, asked
        self.references = {
            name: spaced(texts.token_set_items(words)) for name, words in references.items()
        }
        self.reference = self.references["reference"]
        self.tokens = {
            "math": [tokenizer.token_to_id(str(digit)) for digit in range(10)],
            "code": spaced(texts.NAMES + texts.VALUES),
            "legal": spaced(
                sorted({matter[i] for matter in texts.MATTERS_SPLIT for i in (1, 2, 3, 5)})
            ),
        }
        self.prompts = {
            (pool, domain): [tokenizer.encode(q.prompt).ids for q in asked[pool][domain]]
            for pool in asked
            for domain in DOMAINS
        }
        self.endings = {
            (pool, domain): [
                tokenizer.encode(f"{GLUE[domain]}{q.answer}{q.end}").ids
                for q in asked[pool][domain]
            ]
            for pool in asked
            for domain in DOMAINS
        }

    def answered(
        self, model: Decoder, pool: str, domain: str
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Which questions are answered right, and the probability of each right answer; programs are run."""
        right, probability = endings_read(
            model, self.prompts[pool, domain], self.endings[pool, domain]
        )
        if domain == "code":
            right = programs_run(model, self.tokenizer, self.asked[pool][domain])
        return right, probability

    def kept(
        self, model: Decoder, tensors: Mapping[str, torch.Tensor], *, own_rows: bool
    ) -> dict[str, Any]:
        """All of it, by domain; the ratio only of a checkpoint with ``own_rows``.

        ``right`` and ``probability`` of each question of ``labels``; ``answers``: probabilities of T at the
        places of the first answers, (25, |T|); ``truth``: how many of the other pool are right; ``ratio`` by
        the screener's own code; ``left_out``: its logarithm without each token of T, then of R, less its own.
        Of several reference sets, ``by_reference`` has both of each, and G in Euclidean distance.
        """
        found: dict[str, dict[str, Any]] = {}
        norm = FinalNorm("model.norm.weight", tensors["model.norm.weight"].double().numpy(), "rms")
        rows = tensors["lm_head.weight"].numpy()
        for domain, ids in self.tokens.items():
            right, probability = self.answered(model, "labels", domain)
            first = next_probabilities(model, self.prompts["labels", domain][:BLOCK])[:, ids]
            kept = {
                "right": records.packed(right),
                "probability": records.packed_bytes(probability),
                "answers": records.packed_bytes(first.numpy().ravel()),
                "truth": int(self.answered(model, "truth", domain)[0].sum()),
            }
            if own_rows:
                kept |= ratio_of(rows, ids, self.reference, norm)
            if own_rows and len(self.references) > 1:
                kept["by_reference"] = {
                    name: ratio_of(rows, ids, reference, norm)
                    | {"gap": round(gap(*sides(rows, ids, reference), "euclidean").mean, 7)}
                    for name, reference in self.references.items()
                }
            found[domain] = kept
        return found


def sides(rows: Rows, ids: list[int], reference: list[int]) -> tuple[Rows, Rows]:
    """The rows of T, and of R without those of T."""
    return rows[ids], rows[[i for i in reference if i not in ids]]


def ratio_of(rows: Rows, ids: list[int], reference: list[int], norm: FinalNorm) -> dict[str, Any]:
    """The ratio, and its logarithm without each token of T, then of R, less its own."""
    figure = ratio(*sides(rows, ids, reference), norm, "BF16")
    left = np.concatenate([figure.left_out_domain, figure.left_out_reference])
    return {
        "ratio": round(figure.mean, 7),
        "left_out": records.packed_halves(np.log(left) - np.log(figure.mean)),
    }


@torch.inference_mode()
def next_probabilities(model: Decoder, prompts: list[list[int]]) -> torch.Tensor:
    """Probabilities of the token after each prompt, (prompts, vocabulary)."""
    after = torch.zeros(len(prompts), len(model.rows))
    for group, ids, lengths in batches(prompts):
        states = model(ids)[torch.arange(len(group)), lengths - 1]
        after[group] = torch.softmax(model.head(states), -1)
    return after
