"""What other papers measure on the same vectors: the rivals of dispersion, all from one matrix of products.

Vectors are rows, (n, d), taken as they are (dispersion alone takes their directions). With their mean moved
to the origin, one matrix of products of the smaller side, (n, n) or (d, d), accumulated in float64 over
blocks, gives every spectrum; neighbours are found once for all groups. Standard errors are a jackknife over
documents: groups that documents join in turn, 32 of them (each document by itself up to 32), 16 where the
smaller side is above 64, 10 above 256, and no error above 2,048, since each group costs three
eigendecompositions of that side. A value that is not defined for these vectors is NaN; ``SPECTRUM`` says
when.

All but the share of the mean and the dimension by neighbours are bounded by n, and rise with it: compare sets
of about as many vectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import GeometryError, TooFewVectorsError
from lmeval_dispersion.geometry.neighbours import nearest_rows
from lmeval_dispersion.geometry.vectors import Array
from lmeval_dispersion.statistics import jackknife_se

Groups = NDArray[np.int64]

_BLOCK = 512  # rows widened to float64 at a time
_GROUPS = ((64, 32), (256, 16), (2048, 10))  # smaller side up to -> groups; none above
_RANKME = 1e-7  # the constant of its paper
_FIRST_RANK, _LAST_RANK = 4, 100  # of alpha-ReQ's fit
_DISCARDED = 0.1  # of TwoNN's largest ratios
_NEIGHBOURS = 24  # kept of each row, so that two are left without any group
_NOISE = 1e-12  # of a row's length: nearer to the mean it has no direction from there
_NULL = 1e-13  # of the largest eigenvalue: rounding


class SpectrumMetric(NamedTuple):
    """What one of the rivals is.

    Attributes:
        label: What a table calls it.
        hint: Its range and how to read it, and when it is undefined.
        source: The paper that defines it.
    """

    label: str
    hint: str
    source: str


SPECTRUM: dict[str, SpectrumMetric] = {
    "rankme": SpectrumMetric(
        "RankMe",
        "exp of the entropy of the singular values; 1 one direction, min(n, d) all alike",
        "Garrido et al., ICML 2023",
    ),
    "effective_rank": SpectrumMetric(
        "Effective rank",
        "exp of the entropy of the eigenvalues of centred unit rows' covariance; 1 to min(n, d)",
        "Roy and Vetterli, EUSIPCO 2007; Wei et al. (Diff-eRank), NeurIPS 2024",
    ),
    "alpha_req": SpectrumMetric(
        "alpha-ReQ",
        "exponent by which the covariance's eigenvalues decay, ranks 4 to 100; 0 flat; undefined below three "
        "such ranks",
        "Agrawal et al., NeurIPS 2022",
    ),
    "participation_ratio": SpectrumMetric(
        "Participation ratio",
        "(sum of eigenvalues)^2 / sum of squares, of the covariance; 1 one direction, min(n - 1, d) flat",
        "Gao et al., bioRxiv 214262 (2017)",
    ),
    "stable_rank": SpectrumMetric(
        "Stable rank",
        "squared Frobenius over squared spectral norm; 1 one direction, min(n, d) flat",
        "Rudelson and Vershynin, JACM 54 (2007)",
    ),
    "mean_share": SpectrumMetric(
        "Share of the mean",
        "squared length of the mean vector over the mean squared length; 0 centred, 1 all the same",
        "Mu and Viswanath, ICLR 2018",
    ),
    "isoscore": SpectrumMetric(
        "IsoScore",
        "evenness of the variance over the d principal directions; 0 one direction, 1 isotropic",
        "Rudman et al., Findings of ACL 2022",
    ),
    "two_nn": SpectrumMetric(
        "TwoNN",
        "dimension of the manifold, by the ratio of the distances to the two nearest neighbours; above 0; "
        "undefined below five different vectors",
        "Facco et al., Scientific Reports 7 (2017)",
    ),
}


class SpectrumEstimate(NamedTuple):
    """One metric of a set of vectors with what is needed for paired comparisons.

    Attributes:
        value: Its value; NaN where it is not defined.
        se: Jackknife standard error over documents; NaN where one of ``left_out`` is, or there is none.
        left_out: The value without each group of documents, shape (groups,).
    """

    value: float
    se: float
    left_out: Array


def spectrum_metrics(x: ArrayLike) -> dict[str, float]:
    """Every metric of :data:`SPECTRUM` of the rows of ``x`` (n >= 3, d >= 2), by its key.

    Raises:
        TooFewVectorsError: n < 3.
        GeometryError: A non-finite value, or another shape.

    >>> found = spectrum_metrics([[1, 0], [-1, 0], [0, 1], [0, -1]])
    >>> round(found["stable_rank"], 6), round(found["effective_rank"], 6), found["mean_share"]
    (2.0, 2.0, 0.0)
    """
    return _Products.of(x).metrics()


def spectrum_estimates(x: ArrayLike, groups: int | None = None) -> dict[str, SpectrumEstimate]:
    """:func:`spectrum_metrics` with jackknife errors; ``groups`` (at most n) is by default the docstring's.

    Row i is in group i mod ``groups``: two models' vectors of the same documents, in one order and with one
    number of groups, can be compared group by group.

    Raises:
        TooFewVectorsError: n < 4.
        GeometryError: As :func:`spectrum_metrics`.
    """
    products = _Products.of(x)
    n = products.n
    if n < 4:
        raise TooFewVectorsError(f"expected at least 4 vectors for an error, got {n}; pass more")
    count = min(jackknife_groups(n, products.d) if groups is None else groups, n)
    if not count:
        return {
            name: SpectrumEstimate(value, float("nan"), np.empty(0))
            for name, value in products.metrics().items()
        }
    of = np.arange(n, dtype=np.int64) % count
    whole = products.metrics()
    left = [products.metrics(of != group) for group in range(count)]
    found = {}
    for name, value in whole.items():
        left_out = np.array([one[name] for one in left])
        found[name] = SpectrumEstimate(value, jackknife_se(left_out), left_out)
    return found


def jackknife_groups(n: int, d: int) -> int:
    """How many groups the jackknife over ``n`` vectors of width ``d`` has; 0 where it would cost too much."""
    side = min(n, d)
    return next((min(n, groups) for most, groups in _GROUPS if side <= most), 0)


def effective_rank(x: ArrayLike) -> float:
    """Effective number of dimensions that the rows of ``x`` (n >= 2, d) spread over, in [1, min(n, d)].

    Rows are centred, scaled to length one, and the entropy of the normalised eigenvalues of their
    covariance is exponentiated. Low: the texts (or tokens) lie along few directions around their mean.
    Differs from the Vendi score by the centring.

    Raises:
        TooFewVectorsError: n < 2.
        GeometryError: A non-finite value, or all rows are the same.

    Source: "Diff-eRank: A Novel Rank-Based Metric for Evaluating Large Language Models" (NeurIPS 2024),
    after Roy and Vetterli (2007).

    >>> round(effective_rank([[1, 0], [-1, 0], [0, 1], [0, -1]]), 6)
    2.0
    """
    rows = np.asarray(x, dtype=np.float64)
    if rows.ndim != 2 or len(rows) < 2:
        raise TooFewVectorsError(f"expected `x` of shape (n >= 2, d), got {rows.shape}; pass more vectors")
    if not np.isfinite(rows).all():
        raise GeometryError("the effective rank needs finite vectors")
    centred = rows - rows.mean(axis=0)
    lengths = np.sqrt(np.einsum("ij,ij->i", centred, centred))
    # Below rounding of the rows themselves a distance from the mean is noise, not a direction.
    kept = lengths > _NOISE * np.sqrt(np.einsum("ij,ij->i", rows, rows))
    if not kept.any():
        raise GeometryError("the effective rank of rows that are all the same is not defined")
    unit = centred[kept] / lengths[kept, None]
    gram = unit.T @ unit if unit.shape[1] < len(unit) else unit @ unit.T
    return _entropy_rank(np.linalg.eigvalsh(gram))


class _Products:
    """Products of rows whose mean was moved to the origin, and all that follows from them.

    Attributes:
        rows: The rows as given, (n, d).
        mean: Their mean, (d,).
        along: Product of each moved row with the mean, (n,).
        gram: Products of the moved rows, (n, n), where n <= d; else None.
        moment: Sum of their outer products, (d, d), where n > d; else None.
    """

    def __init__(self, rows: NDArray[Any]) -> None:
        self.rows = rows
        self.n, self.d = rows.shape
        self.mean: Array = sum((block.sum(axis=0) for _, block in self._widened()), np.zeros(self.d)) / self.n
        self.along = np.empty(self.n)
        self.squares = np.empty(self.n)
        self.gram: Array | None = None
        self.moment: Array | None = None
        if self.n <= self.d:
            moved = rows.astype(np.float64) - self.mean
            self.gram = moved @ moved.T
        else:
            self.moment = np.zeros((self.d, self.d))
        for i, block in self._moved():
            self.along[i : i + len(block)] = block @ self.mean
            self.squares[i : i + len(block)] = np.einsum("ij,ij->i", block, block)
            if self.moment is not None:
                self.moment += block.T @ block
        self.length = float(self.mean @ self.mean)
        distance, place = nearest_rows(rows, self.mean, min(_NEIGHBOURS, self.n - 1))
        # What is below rounding of the products is no distance.
        self.near = np.where(distance > 1e-14 * self.squares.max(), distance, 0.0), place

    @classmethod
    def of(cls, x: ArrayLike) -> _Products:
        rows = np.asarray(x)
        if rows.dtype.kind != "f":
            rows = rows.astype(np.float64)
        if rows.ndim != 2 or rows.shape[1] < 2:
            raise GeometryError(f"expected `x` of shape (n, d >= 2), got {rows.shape}")
        if len(rows) < 3:
            raise TooFewVectorsError(
                f"expected `x` of shape (n >= 3, d), got {rows.shape}; pass more vectors"
            )
        if not np.isfinite(rows).all():
            raise GeometryError("the spectrum needs finite vectors; leave those out that are not")
        return cls(rows)

    def metrics(self, kept: NDArray[np.bool_] | None = None) -> dict[str, float]:
        """Every metric of all rows, or of those ``kept`` (n,)."""
        chosen = np.arange(self.n) if kept is None else np.flatnonzero(kept)
        n = len(chosen)
        raw, centred, unit = self._spectra(chosen)
        along, squares = self.along[chosen], self.squares[chosen]
        square = float(squares.mean() + 2 * along.mean() + self.length)  # mean squared length
        variance = max(float(centred.sum()), 0.0) / n
        return {
            "rankme": _rankme(raw),
            "effective_rank": _entropy_rank(unit),
            "alpha_req": _decay(centred),
            "participation_ratio": _ratio(float(centred.sum()) ** 2, float(np.square(centred).sum())),
            "stable_rank": _ratio(float(raw.sum()), float(raw[-1])),
            "mean_share": 1 - variance / square if square > 0 else float("nan"),
            "isoscore": _isoscore(centred, self.d),
            "two_nn": self._two_nn(chosen, kept),
        }

    def _spectra(self, chosen: Groups) -> tuple[Array, Array, Array]:
        """Ascending eigenvalues of the raw, the centred, and the centred unit rows' products."""
        n = len(chosen)
        noise = _NOISE**2 * (self.squares + 2 * self.along + self.length)[chosen]
        if self.gram is not None:
            gram, along = self.gram[np.ix_(chosen, chosen)], self.along[chosen]
            raw = gram + along[:, None] + along[None, :] + self.length
            middle = gram.mean(axis=0)
            gram = gram - middle[:, None] - middle[None, :] + middle.mean()
            lengths = gram.diagonal().copy()
            seen = lengths > np.maximum(noise, 1e-15 * lengths.max())
            scale = np.sqrt(lengths[seen])
            unit = gram[np.ix_(seen, seen)] / np.outer(scale, scale)
            return _eigenvalues(raw), _eigenvalues(gram), _eigenvalues(unit)
        assert self.moment is not None
        out = np.ones(self.n, dtype=bool)
        out[chosen] = False
        moment, total = self.moment.copy(), np.zeros(self.d)
        for _, block in self._moved(np.flatnonzero(out)):
            moment -= block.T @ block
            total -= block.sum(axis=0)  # all moved rows sum to zero
        cross = np.outer(self.mean, total)
        raw = moment + cross + cross.T + n * np.outer(self.mean, self.mean)
        centre = total / n
        centred = moment - n * np.outer(centre, centre)
        unit = np.zeros((self.d, self.d))
        place = 0
        for _, block in self._moved(chosen):
            block -= centre
            squares = np.einsum("ij,ij->i", block, block)
            seen = squares > noise[place : place + len(block)]
            place += len(block)
            block = block[seen] / np.sqrt(squares[seen])[:, None]
            unit += block.T @ block
        return _eigenvalues(raw), _eigenvalues(centred), _eigenvalues(unit)

    def _two_nn(self, chosen: Groups, kept: NDArray[np.bool_] | None) -> float:
        distance, index = (values[chosen] for values in self.near)
        if kept is not None:
            # A row all of whose neighbours but one are left out does not count, like a repeated one.
            distance = np.sort(np.where(kept[index], distance, np.inf), axis=1)
        first, second = distance[:, 0], distance[:, 1]
        usable = (first > 0) & np.isfinite(second)
        ratios = np.sort(np.sqrt(second[usable] / first[usable]))
        return _two_nn_dimension(ratios)

    def _moved(self, chosen: Groups | None = None) -> Iterable[tuple[int, Array]]:
        for i, block in self._widened(chosen):
            yield i, block - self.mean

    def _widened(self, chosen: Groups | None = None) -> Iterable[tuple[int, Array]]:
        count = self.n if chosen is None else len(chosen)
        for i in range(0, count, _BLOCK):
            rows = self.rows[i : i + _BLOCK] if chosen is None else self.rows[chosen[i : i + _BLOCK]]
            yield i, rows.astype(np.float64)


def _eigenvalues(products: Array) -> Array:
    """Ascending, none below zero; what is rounding is zero."""
    if not products.size:
        return np.zeros(1)
    values = np.linalg.eigvalsh(products)
    return np.asarray(np.where(values > _NULL * max(values[-1], 0.0), values, 0.0))


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else float("nan")


def _entropy_rank(values: Array) -> float:
    """Exp of the entropy of eigenvalues, scaled to sum to 1; NaN where all are 0."""
    values = values[values > 0]
    if not len(values):
        return float("nan")
    values = values / values.sum()
    values = values[values > 1e-15]
    return float(np.exp(-(values * np.log(values)).sum()))


def _rankme(values: Array) -> float:
    singular = np.sqrt(values)
    if not singular.sum() > 0:
        return float("nan")
    p = singular / singular.sum() + _RANKME
    return float(np.exp(-(p * np.log(p)).sum()))


def _decay(values: Array) -> float:
    """Exponent of the eigenvalues' decay: least squares of log value on log rank, weighted by 1 / rank."""
    falling = values[values > 0][::-1]
    rank = np.arange(_FIRST_RANK, min(len(falling), _LAST_RANK) + 1)
    if len(rank) < 3:
        return float("nan")
    x, y, weight = np.log(rank), np.log(falling[rank - 1]), 1 / rank
    x = x - np.average(x, weights=weight)
    return float(-(weight * x * y).sum() / (weight * x * x).sum())


def _isoscore(values: Array, d: int) -> float:
    length = float(np.sqrt(np.square(values).sum()))
    if not length > 0:
        return float("nan")
    scaled = np.zeros(d)
    scaled[: len(values[-d:])] = np.sqrt(d) * values[-d:] / length
    defect = float(np.sqrt(np.square(scaled - 1).sum())) / np.sqrt(2 * (d - np.sqrt(d)))
    used = (d - defect**2 * (d - np.sqrt(d))) ** 2 / d**2
    return float((d * used - 1) / (d - 1))


def _two_nn_dimension(ratios: Array) -> float:
    """Slope of -log(1 - share of smaller ratios) on log ratio through the origin, largest tenth left out."""
    count = int(len(ratios) * (1 - _DISCARDED))
    if len(ratios) < 5:
        return float("nan")
    x = np.log(ratios[:count])
    y = -np.log(1 - np.arange(1, count + 1) / len(ratios))
    return _ratio(float(x @ y), float(x @ x))
