"""A kNN-LM by exact search: does a key lower the perplexity, and which key lowers it most?

The datastore holds a pair for every token of the first part of a text: the state that predicts it
(the key) and the token (the value). A token's probability by its k nearest keys is the share of
those whose value it is, each weighed by exp(-squared distance / temperature); the kNN-LM mixes it
with the model's own, by a weight. Weight and temperature are those of lowest perplexity on the
second part; all that is reported is of the third. Temperatures are multiples of the keys' variance
(mean squared distance to their mean), so that one grid fits every layer.

Source: Khandelwal et al. 2020; temperature: Xu et al. 2023. RD section 3.3 recommends the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion import statistics
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.arguments import PARTS
from lmeval_dispersion.laboratory.models import CausalModel
from lmeval_dispersion.laboratory.report import with_ends
from lmeval_dispersion.laboratory.segments import Segments, Unit, blocks
from lmeval_dispersion.laboratory.study import Study, TableRow
from lmeval_dispersion.report.declared import count
from lmeval_dispersion.statistics import Array

WEIGHTS = np.arange(20) / 20  # of the neighbours; 0 is the model alone
TEMPERATURES = 2.0 ** np.arange(-10, 1)  # in units of the keys' variance

_QUERIES = 256  # at once
_BLOCK = 2**16  # keys at once


@dataclass(frozen=True)
class Part:
    """Segments of one part, and the document of each; in a running text each is its own.

    ``unit``: what the documents are, ``document`` or ``segment``.
    """

    segments: Segments
    documents: NDArray[np.int64]
    unit: str


class Datastore:
    """The keys (n, d) of one layer on the model's device, and their values (n,)."""

    def __init__(self, causal: CausalModel, part: Part, layer: str) -> None:
        drawn = part.segments
        length = drawn.tokens.shape[1] - 1
        segments = len(drawn.tokens)
        device = causal.loaded.device
        self.keys = torch.empty(segments * length, causal.width, device=device)
        for rows in blocks(segments, causal.batch):
            states = causal.run(drawn, rows, [layer], all_but_last)[layer]
            place = slice(rows[0] * length, (rows[-1] + 1) * length)
            self.keys[place] = torch.from_numpy(states).to(device).flatten(0, 1)
        tokens = drawn.tokens[:, 1:].astype(np.int64)
        self.values = torch.from_numpy(tokens).to(device).flatten()
        self.mean = self.keys.mean(dim=0)
        self.keys -= self.mean  # smaller numbers: more digits of their distances
        self.norms = self.keys.square().sum(dim=1)
        self.variance = float(self.norms.cpu().double().mean())

    def shares(self, states: Tensor, tokens: Tensor, neighbours: int) -> NDArray[np.float64]:
        """Probability of ``tokens`` (q,) by the keys nearest to ``states`` (q, d), (q, temperatures)."""
        queries = states - self.mean
        nearest = torch.empty(len(queries), 0, device=queries.device)
        values = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
        for start in range(0, len(self.keys), _BLOCK):
            end = start + _BLOCK
            distances = self.norms[start:end] - 2 * (queries @ self.keys[start:end].T)
            most = min(neighbours, distances.shape[1])
            distances, places = distances.topk(most, dim=1, largest=False)
            nearest = torch.cat([nearest, distances], dim=1)
            values = torch.cat([values, self.values[places + start]], dim=1)
            most = min(neighbours, nearest.shape[1])
            nearest, places = nearest.topk(most, dim=1, largest=False)
            values = values.gather(1, places)
        # The squared norm of the query is the same for all of its neighbours, so it cancels.
        scaled = -nearest.cpu().double() / self.variance
        is_right = (values == tokens[:, None]).cpu()
        shares = []
        for temperature in TEMPERATURES:
            weights = (scaled / temperature).softmax(dim=1)
            shares.append((weights * is_right).sum(dim=1))
        return np.asarray(torch.stack(shares, dim=1).numpy())


def all_but_last(states: Tensor) -> NDArray[np.float32]:
    """The states that predict a token of their segment, shape (b, t - 1, d), float32."""
    return np.asarray(states[:, :-1].float().cpu().numpy())


@dataclass
class Search:
    """One key of a kNN-LM, whose datastore is made when the first unit of work needs it."""

    study: Study
    causal: CausalModel
    layer: str
    parts: dict[str, Part]

    @cached_property
    def datastore(self) -> Datastore:
        """The keys and values of the first part."""
        return Datastore(self.causal, self.parts["datastore"], self.layer)

    def searched(self, name: str) -> tuple[Array, Array]:
        """Of every token of a part: its probability by neighbours (n, t, temperatures), and NLL (n, t)."""
        drawn = self.parts[name].segments
        works = blocks(len(drawn.tokens), self.causal.batch)
        do = partial(self._unit, drawn)
        units = list(self.study.kept(f"knn {self.layer} {name}", works, do))
        shares = np.concatenate([unit["shares"] for unit in units])
        self.study.facts.setdefault("variance", {})[self.layer] = float(units[0]["variance"])
        return shares, np.concatenate([unit["nll"] for unit in units])

    def _unit(self, drawn: Segments, rows: NDArray[np.int64]) -> Unit:
        result = self.causal.run(drawn, rows, [self.layer], all_but_last, losses=True)
        device = self.causal.loaded.device
        states = torch.from_numpy(result[self.layer]).to(device).flatten(0, 1)
        tokens = torch.from_numpy(drawn.tokens[rows, 1:].astype(np.int64)).to(device).flatten()
        neighbours = self.study.settings["neighbours"]
        found = []
        for start in range(0, len(states), _QUERIES):
            queries = states[start : start + _QUERIES]
            right = tokens[start : start + _QUERIES]
            found.append(self.datastore.shares(queries, right, neighbours))
        shares = np.concatenate(found).reshape(*result["nll"].shape, len(TEMPERATURES))
        return {
            "shares": shares,
            "nll": result["nll"],
            "variance": np.array(self.datastore.variance),
        }


def knn_rows(study: Study, causal: CausalModel, layers: Sequence[str]) -> Iterator[TableRow]:
    """The table ``knn``, a row a key; ``losses``, a row a key and document of the third part."""
    parts = parts_of(study, causal)
    for layer in layers:
        search = Search(study, causal, layer, parts)
        shares, nll = search.searched("tune")
        weight, temperature = chosen(shares, nll)
        shares, nll = search.searched("test")
        place = TEMPERATURES.tolist().index(temperature)
        losses = mixed(shares[..., place], nll, weight)
        about = {"layer": layer, "unit": parts["test"].unit}
        yield "knn", {**about, "weight": weight, "temperature": temperature}
        documents = parts["test"].documents
        for document in dict.fromkeys(documents.tolist()):
            is_in = documents == document
            row = {"layer": layer, "document": document, "tokens": int(nll[is_in].size)}
            row |= {"without": float(nll[is_in].sum()), "nll": float(losses[is_in].sum())}
            yield "losses", row
        del search  # the next datastore is made after this one is freed


def mixed(shares: Array, nll: Array, weight: float) -> Array:
    """NLL in nats of tokens by the kNN-LM: neighbours by ``weight``, the model by the rest."""
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log(weight * shares + (1 - weight) * np.exp(-nll)))


def chosen(shares: Array, nll: Array) -> tuple[float, float]:
    """Weight and temperature of lowest perplexity on tokens, the first of equals."""
    best = (np.inf, 0.0, float(TEMPERATURES[0]))
    for place, temperature in enumerate(TEMPERATURES.tolist()):
        for weight in WEIGHTS.tolist():
            loss = float(mixed(shares[..., place], nll, weight).mean())
            if loss < best[0]:
                best = (loss, weight, temperature)
    return best[1], best[2]


def parts_of(study: Study, causal: CausalModel) -> dict[str, Part]:
    """The three parts: shares of the text in its order, cut between documents, or texts of their own."""
    settings = study.settings
    shares = {name: settings[name] for name in PARTS if settings[name] is not None}
    most = settings["segments"]
    parts: dict[str, Part] = {}
    if shares:
        whole = _in_order(study, causal, "knn", "data", round(most * sum(shares.values())))
        bounds = np.cumsum(list(shares.values())) / sum(shares.values())
        cuts = [_cut(whole.documents, bound) for bound in bounds]
        for name, start, end in zip(shares, [0, *cuts], cuts, strict=False):
            drawn = whole.segments
            segments = Segments(drawn.tokens[start:end], drawn.origins[start:end], drawn.source)
            parts[name] = Part(segments, whole.documents[start:end], whole.unit)
    for name, share in PARTS.items():
        if name not in parts:
            wanted = max(2, round(most * share))
            parts[name] = _in_order(study, causal, name, name, wanted)
    least = {"datastore": 1, "tune": 1, "test": 2}
    for name, part in parts.items():
        if len(set(part.documents.tolist())) < least[name]:
            raise UsageError(
                f"expected at least {count(least[name], part.unit)} for the {name} part of a kNN-LM, "
                f"got {len(set(part.documents.tolist()))} from {part.segments.source}; pass more text, "
                "a shorter segment, or a text of its own",
                argument=name,
            )
    study.facts["parts"] = {name: len(part.segments.tokens) for name, part in parts.items()}
    return parts


def _in_order(study: Study, causal: CausalModel, name: str, source: str, most: int) -> Part:
    """At most ``most`` segments of a source in the order of its text."""
    drawn = study.segments(name, causal, most, source=source)
    order = np.lexsort((drawn.origins[:, 1], drawn.origins[:, 0]))
    segments = Segments(drawn.tokens[order], drawn.origins[order], drawn.source)
    if study.settings["pack"] or study.texts[source].continuous:
        return Part(segments, np.arange(len(order)), "segment")
    return Part(segments, segments.origins[:, 0], "document")


def _cut(documents: NDArray[np.int64], bound: float) -> int:
    """The place nearest below a share ``bound`` of the segments where a document begins."""
    place = round(bound * len(documents))
    while 0 < place < len(documents) and documents[place] == documents[place - 1]:
        place -= 1
    return place


def perplexity_change(
    first: Array, second: Array, tokens: Array, claims: int
) -> statistics.Interval:
    """Change of perplexity in per cent from ``second`` to ``first``, sums of NLL by document, (n,).

    The bounds are a jackknife's over documents, on the logarithm, for ``claims`` changes together.
    """
    difference = first - second
    value = difference.sum() / tokens.sum()
    left_out = (difference.sum() - difference) / (tokens.sum() - tokens)
    level = 1 - (1 - statistics.LEVEL) / claims
    bounds = statistics.student_bounds(
        float(value), statistics.jackknife_se(left_out), len(tokens), level
    )
    percent = [100 * float(np.expm1(each)) for each in (value, *bounds)]
    return statistics.Interval(*percent)


def summary_of(losses: pd.DataFrame, settings: pd.DataFrame) -> pd.DataFrame:
    """``settings`` with each key's perplexity without neighbours and with them, and the change."""
    rows = []
    keys = settings["layer"].tolist()
    for key in keys:
        of_key = losses[losses["layer"] == key]
        tokens = of_key["tokens"].to_numpy()
        without = of_key["without"].to_numpy()
        loss = of_key["nll"].to_numpy()
        row = {
            "without": float(np.exp(without.sum() / tokens.sum())),
            "perplexity": float(np.exp(loss.sum() / tokens.sum())),
            **with_ends("change", perplexity_change(loss, without, tokens, _claims(keys))),
            "documents": len(of_key),
            "tokens": int(tokens.sum()),
        }
        rows.append(row)
    return pd.concat([settings, pd.DataFrame(rows)], axis=1)


def against(losses: pd.DataFrame, key: str) -> pd.DataFrame:
    """A row for every ``other`` key: the change of perplexity from that one to ``key``."""
    keys = list(dict.fromkeys(losses["layer"]))
    mine = losses[losses["layer"] == key]
    tokens = mine["tokens"].to_numpy()
    rows = []
    for other in keys:
        if other == key:
            continue
        loss = losses[losses["layer"] == other]["nll"].to_numpy()
        moved = perplexity_change(mine["nll"].to_numpy(), loss, tokens, _claims(keys))
        rows.append({"layer": key, "other": other, **with_ends("change", moved)})
    return pd.DataFrame(rows)


def _claims(keys: Sequence[str]) -> int:
    """Changes that a report may claim: of every key, and between one and each other."""
    return 2 * len(keys) - 1
