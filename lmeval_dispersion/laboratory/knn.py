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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion import statistics
from lmeval_dispersion.errors import UsageError, count
from lmeval_dispersion.laboratory.arguments import PARTS
from lmeval_dispersion.laboratory.models import CausalModel
from lmeval_dispersion.laboratory.report import jackknife_bounds, with_ends
from lmeval_dispersion.laboratory.segments import Segments, Unit, blocks
from lmeval_dispersion.laboratory.study import Study, TableRow
from lmeval_dispersion.statistics import Array

WEIGHTS = np.arange(20) / 20  # of the neighbours; 0 is the model alone
TEMPERATURES = 2.0 ** np.arange(-10, 1)  # in units of the keys' variance

_QUERIES = 256  # at once
_BLOCK = 2**16  # keys at once


@dataclass(frozen=True)
class Part:
    """One part of the text of a kNN-LM: the datastore, the tuning part or the test part.

    Attributes:
        segments: The segments of the part, in the order of the text.
        documents: Shape (n,), int64: the number of the document from which each segment was cut. In
            a running text (a text file, or joined texts) every segment counts as a document.
        unit: What reports call an entry of ``documents``: ``document``, or ``segment`` in a running
            text.
    """

    segments: Segments
    documents: NDArray[np.int64]
    unit: str


class Datastore:
    """The datastore of a kNN-LM: a layer's states as keys, and the tokens that they predict.

    All tensors are on the model's device.

    Args:
        causal: The model.
        part: The datastore part of the text.
        layer: Full name of the layer.

    Attributes:
        keys: Shape (n, d), float32: the states, minus the mean state.
        values: Shape (n,), int64: the token that follows each state.
        mean: Shape (d,), the mean state.
        norms: Shape (n,), the squared norm of each key.
        variance: The mean squared distance of the states to their mean.
    """

    def __init__(self, causal: CausalModel, part: Part, layer: str) -> None:
        drawn = part.segments
        length = drawn.tokens.shape[1] - 1
        segments = len(drawn.tokens)
        device = causal.loaded.device
        self.keys = torch.empty(segments * length, causal.width, device=device)
        for rows in blocks(segments, causal.batch):
            of_layers = causal.run(drawn, rows, [layer], all_but_last)
            states = torch.from_numpy(of_layers[layer])
            begin = rows[0] * length
            end = (rows[-1] + 1) * length
            self.keys[begin:end] = states.to(device).flatten(0, 1)
        self.values = _following(drawn.tokens, device)
        self.mean = self.keys.mean(dim=0)
        self.keys -= self.mean  # smaller numbers: more digits of their distances
        self.norms = self.keys.square().sum(dim=1)
        norms = self.norms.cpu().double()
        self.variance = float(norms.mean())

    def shares(self, states: Tensor, tokens: Tensor, neighbours: int) -> NDArray[np.float64]:
        """Return the probability that the nearest keys give to the token after each query.

        Args:
            states: Shape (q, d), the queries: states of the datastore's layer.
            tokens: Shape (q,), the token that follows each query.
            neighbours: Number of nearest keys that count; in a smaller datastore all keys do.

        Returns:
            Shape (q, len(TEMPERATURES)), float64: the probability at each temperature.
        """
        queries = states - self.mean
        device = queries.device
        nearest = torch.empty(len(queries), 0, device=device)
        values = torch.empty(len(queries), 0, dtype=torch.int64, device=device)
        for start in range(0, len(self.keys), _BLOCK):
            end = start + _BLOCK
            products = queries @ self.keys[start:end].T
            distances = self.norms[start:end] - 2 * products
            most = min(neighbours, distances.shape[1])
            distances, places = distances.topk(most, dim=1, largest=False)
            of_block = self.values[places + start]
            nearest = torch.cat([nearest, distances], dim=1)
            values = torch.cat([values, of_block], dim=1)
            most = min(neighbours, nearest.shape[1])
            nearest, places = nearest.topk(most, dim=1, largest=False)
            values = values.gather(1, places)
        # The squared norm of the query is the same for all of its neighbours, so it cancels.
        scaled = -nearest.cpu().double() / self.variance
        is_right = values == tokens[:, None]
        is_right = is_right.cpu()
        shares = []
        for temperature in TEMPERATURES:
            weights = (scaled / temperature).softmax(dim=1)
            of_right = weights * is_right
            shares.append(of_right.sum(dim=1))
        by_temperature = torch.stack(shares, dim=1)
        return np.asarray(by_temperature.numpy())


def all_but_last(states: Tensor) -> NDArray[np.float32]:
    """Return the states of all tokens but the last of each segment, which no token follows.

    Args:
        states: Shape (b, t, d).

    Returns:
        Shape (b, t - 1, d), float32, on the CPU.
    """
    predicting = states[:, :-1].float()
    return np.asarray(predicting.cpu().numpy())


def _following(tokens: NDArray[np.uint32], device: torch.device) -> Tensor:
    """The tokens after the first of every segment, shape (n * (t - 1),), int64, on the device."""
    after_first = torch.from_numpy(tokens[:, 1:].astype(np.int64))
    return after_first.to(device).flatten()


@dataclass
class Search:
    """The nearest-neighbour search of a kNN-LM whose keys are the states of one layer.

    The datastore is filled at its first use; a resumed study whose results are all on disk does not
    fill it.

    Attributes:
        study: The study that keeps the results.
        causal: The model.
        layer: Full name of the layer.
        parts: The parts ``datastore``, ``tune`` and ``test`` of the text.
    """

    study: Study
    causal: CausalModel
    layer: str
    parts: dict[str, Part]

    @cached_property
    def datastore(self) -> Datastore:
        """The keys and values from the datastore part of the text."""
        return Datastore(self.causal, self.parts["datastore"], self.layer)

    def searched(self, name: str) -> tuple[Array, Array]:
        """Find the nearest neighbours of every state of a part, or read back an earlier search.

        Args:
            name: ``tune`` or ``test``.

        Returns:
            For each token but the first of n segments, of t + 1 tokens each: the probability that
            the neighbours give to the token, shape (n, t, len(TEMPERATURES)), and the model's
            negative log-probability of the token in nats, shape (n, t).
        """
        drawn = self.parts[name].segments
        works = blocks(len(drawn.tokens), self.causal.batch)
        do = partial(self._unit, drawn)
        shares = []
        losses = []
        variance = float("nan")
        for unit in self.study.kept(f"knn {self.layer} {name}", works, do):
            shares.append(unit["shares"])
            losses.append(unit["nll"])
            variance = float(unit["variance"])
        variances = self.study.facts.setdefault("variance", {})
        variances[self.layer] = variance
        return np.concatenate(shares), np.concatenate(losses)

    def _unit(self, drawn: Segments, rows: NDArray[np.int64]) -> Unit:
        result = self.causal.run(drawn, rows, [self.layer], all_but_last, losses=True)
        losses = result["nll"]
        device = self.causal.loaded.device
        states = torch.from_numpy(result[self.layer])
        states = states.to(device).flatten(0, 1)
        tokens = _following(drawn.tokens[rows], device)
        neighbours = self.study.settings["neighbours"]
        shares = []
        for start in range(0, len(states), _QUERIES):
            end = start + _QUERIES
            queries = states[start:end]
            right = tokens[start:end]
            shares.append(self.datastore.shares(queries, right, neighbours))
        of_tokens = np.concatenate(shares)
        return {
            "shares": of_tokens.reshape(*losses.shape, len(TEMPERATURES)),
            "nll": losses,
            "variance": np.array(self.datastore.variance),
        }


def knn_rows(study: Study, causal: CausalModel, layers: Sequence[str]) -> Iterator[TableRow]:
    """Measure a kNN-LM with each layer as its key, and yield the rows of ``knn`` and ``losses``.

    These are tables of a `SublayersResult`. ``knn`` has a row for each layer, with the temperature
    and the weight of the neighbours, which are chosen on the tuning part. ``losses`` has a row for
    each layer and document of the test part, with sums of negative log-probabilities in nats,
    ``without`` neighbours and with them (``nll``).

    Raises:
        UsageError: A part of the text is too short.
    """
    parts = parts_of(study, causal)
    for layer in layers:
        search = Search(study, causal, layer, parts)
        shares, nll = search.searched("tune")
        weight, temperature = chosen(shares, nll)
        shares, nll = search.searched("test")
        place = TEMPERATURES.tolist().index(temperature)
        losses = mixed(shares[..., place], nll, weight)
        setting = {
            "layer": layer,
            "unit": parts["test"].unit,
            "weight": weight,
            "temperature": temperature,
        }
        yield "knn", setting
        documents = parts["test"].documents
        for document in dict.fromkeys(documents.tolist()):
            is_in = documents == document
            of_model = nll[is_in]
            of_knn = losses[is_in]
            row = {
                "layer": layer,
                "document": document,
                "tokens": int(of_model.size),
                "without": float(of_model.sum()),
                "nll": float(of_knn.sum()),
            }
            yield "losses", row
        del search  # the next datastore is made after this one is freed


def mixed(shares: Array, nll: Array, weight: float) -> Array:
    """Return the negative log-probability of tokens by a kNN-LM, in nats.

    Args:
        shares: The probability that the neighbours give to each token, any shape.
        nll: The model's negative log-probability of each token in nats, of the same shape.
        weight: The weight of the neighbours, from 0 to 1; the model has the weight 1 - ``weight``.

    Returns:
        An array of the same shape; infinite where the mixed probability is 0.
    """
    probability = weight * shares + (1 - weight) * np.exp(-nll)
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log(probability))


def chosen(shares: Array, nll: Array) -> tuple[float, float]:
    """Return the weight of the neighbours and the temperature that give the lowest perplexity.

    Both are taken from the grids ``WEIGHTS`` and ``TEMPERATURES``.

    Args:
        shares: Shape (n, t, len(TEMPERATURES)), the probability that the neighbours give to each
            token.
        nll: Shape (n, t), the model's negative log-probability of each token in nats.
    """
    lowest = np.inf
    best = (0.0, float(TEMPERATURES[0]))
    for place, temperature in enumerate(TEMPERATURES.tolist()):
        for weight in WEIGHTS.tolist():
            losses = mixed(shares[..., place], nll, weight)
            loss = float(losses.mean())
            if loss < lowest:
                lowest = loss
                best = (weight, temperature)
    return best


def parts_of(study: Study, causal: CausalModel) -> dict[str, Part]:
    """Return the three parts of the text of a kNN-LM, by name.

    Each part is either a contiguous share of the study's text, which is split only between
    documents, or a separate text.

    Returns:
        A `Part` for each of ``datastore``, ``tune`` and ``test``.

    Raises:
        UsageError: The test part has fewer than two documents (segments, in a running text), or
            another part has none.
    """
    settings = study.settings
    most = settings["segments"]
    shares: dict[str, float] = {}
    for name in PARTS:
        if settings[name] is not None:
            shares[name] = settings[name]
    parts = _shares_of_text(study, causal, shares) if shares else {}
    for name, share in PARTS.items():
        if name not in parts:
            wanted = max(2, round(most * share))
            parts[name] = _in_order(study, causal, name, name, wanted)
    least = {"datastore": 1, "tune": 1, "test": 2}
    lengths = {}
    for name, part in parts.items():
        documents = len(set(part.documents.tolist()))
        if documents < least[name]:
            raise UsageError(
                f"expected at least {count(least[name], part.unit)} for the {name} part of a "
                f"kNN-LM, got {documents} from {part.segments.source}; pass more text or a shorter "
                "segment, or a separate text for this part",
                argument=name,
            )
        lengths[name] = len(part.segments.tokens)
    study.facts["parts"] = lengths
    return parts


def _shares_of_text(
    study: Study, causal: CausalModel, shares: Mapping[str, float]
) -> dict[str, Part]:
    """The parts that are shares of the study's text, in its order, cut between documents."""
    total = sum(shares.values())
    most = round(study.settings["segments"] * total)
    whole = _in_order(study, causal, "knn", "data", most)
    drawn = whole.segments
    parts = {}
    start = 0
    bounds = np.cumsum(list(shares.values())) / total
    for name, bound in zip(shares, bounds, strict=True):
        end = _cut(whole.documents, bound)
        segments = Segments(
            drawn.tokens[start:end],
            drawn.origins[start:end],
            drawn.source,
        )
        parts[name] = Part(segments, whole.documents[start:end], whole.unit)
        start = end
    return parts


def _in_order(study: Study, causal: CausalModel, name: str, source: str, most: int) -> Part:
    """At most ``most`` segments of a source in the order of its text."""
    drawn = study.segments(name, causal, most, source=source)
    texts, places = drawn.origins.T
    order = np.lexsort((places, texts))
    segments = Segments(
        drawn.tokens[order],
        drawn.origins[order],
        drawn.source,
    )
    is_running = study.settings["pack"] or study.texts[source].continuous
    if is_running:
        return Part(segments, np.arange(len(order)), "segment")
    return Part(segments, texts[order], "document")


def _cut(documents: NDArray[np.int64], bound: float) -> int:
    """The place nearest below a share ``bound`` of the segments where a document begins."""
    place = round(bound * len(documents))
    while 0 < place < len(documents) and documents[place] == documents[place - 1]:
        place -= 1
    return place


def perplexity_change(
    first: Array, second: Array, tokens: Array, claims: int
) -> statistics.Interval:
    """Return by how many per cent the perplexity of one model differs from that of another.

    Args:
        first: Shape (n,), the first model's sum of negative log-probabilities in nats for each
            document.
        second: Shape (n,), the sums of the second model, whose perplexity counts as 100 %.
        tokens: Shape (n,), the number of tokens in each document.
        claims: Number of such changes whose 95 % bounds are to hold at once (Bonferroni).

    Returns:
        The change and its 95 % bounds, from a jackknife over documents; negative if the perplexity
        of the first model is lower.
    """
    difference = first - second
    change = difference.sum()
    length = tokens.sum()
    value = change / length
    left_out = (change - difference) / (length - tokens)
    bounds = jackknife_bounds(float(value), left_out, claims)
    percent = [100 * float(np.expm1(each)) for each in (value, *bounds)]
    return statistics.Interval(*percent)


def summary_of(losses: pd.DataFrame, settings: pd.DataFrame) -> pd.DataFrame:
    """Return the table ``knn`` with the perplexity of every layer's kNN-LM.

    Args:
        losses: The table ``losses``, from the rows of `knn_rows`.
        settings: The table ``knn``, from the rows of `knn_rows`: one row for each layer.

    Returns:
        ``settings`` with further columns: ``without``, the perplexity of the model without
        neighbours; ``perplexity``, that of the kNN-LM; ``change``, by how many per cent
        ``perplexity`` differs from ``without``, with 95 % bounds; ``documents`` and ``tokens``, the
        numbers of documents and tokens in the test part.
    """
    rows = []
    keys = settings["layer"].tolist()
    for key in keys:
        of_key = losses[losses["layer"] == key]
        tokens = of_key["tokens"].to_numpy()
        without = of_key["without"].to_numpy()
        loss = of_key["nll"].to_numpy()
        total = tokens.sum()
        change = perplexity_change(loss, without, tokens, _claims(keys))
        row = {
            "without": float(np.exp(without.sum() / total)),
            "perplexity": float(np.exp(loss.sum() / total)),
            **with_ends("change", change),
            "documents": len(of_key),
            "tokens": int(total),
        }
        rows.append(row)
    return pd.concat([settings, pd.DataFrame(rows)], axis=1)


def against(losses: pd.DataFrame, key: str) -> pd.DataFrame:
    """Compare the perplexity of one layer's kNN-LM with that of every other layer's.

    Args:
        losses: The table ``losses`` of `knn_rows`.
        key: The layer whose kNN-LM is compared.

    Returns:
        One row for every other layer, which is named in the column ``other``: ``change``, by how
        many per cent the perplexity with ``key`` differs from that with the other layer, with 95 %
        bounds.
    """
    keys = list(dict.fromkeys(losses["layer"]))
    of_key = losses[losses["layer"] == key]
    tokens = of_key["tokens"].to_numpy()
    loss = of_key["nll"].to_numpy()
    rows = []
    for other in keys:
        if other == key:
            continue
        of_other = losses[losses["layer"] == other]
        other_loss = of_other["nll"].to_numpy()
        change = perplexity_change(loss, other_loss, tokens, _claims(keys))
        row = {
            "layer": key,
            "other": other,
            **with_ends("change", change),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def _claims(keys: Sequence[str]) -> int:
    """Changes that a report may claim: of every key, and between one and each other."""
    return 2 * len(keys) - 1
