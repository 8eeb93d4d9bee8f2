"""How far apart vectors are: the quantities everything else in this project is made of.

Arrays are numpy, ``x`` has shape (n, d): ``n`` vectors of width ``d``, any float dtype. Arithmetic is in
float64. Cosine distance is ``1 - u_i.u_j`` in [0, 2] with ``u = x/|x|``; Euclidean distance is taken on raw
rows. Undefined quantities raise; nothing here returns a silent NaN or a silent 0, because 0 means
*collapsed*.

Mean pair distances over n vectors cost O(n d) for the cosine by closed forms and O(n^2 d) in blocks for the
Euclidean. Pairs share vectors, so the papers' error (sd over pairs / sqrt(pairs)) is too small; it is
given as ``se_pairs``. ``se`` is a jackknife over vectors. Its modules are private; the names are here.

Source: "On the Predictive Power of Representation Dispersion in Language Models" (ICLR 2026), eq. 1,
sections 2.3 and 3.2, appendix A.5.
"""

from lmeval_dispersion.geometry.dispersion import (
    Dispersion,
    Estimate,
    contributions,
    dispersion,
    dispersion_estimate,
    streamed_dispersion_estimate,
    vendi_score,
)
from lmeval_dispersion.geometry.pairs import (
    METRICS,
    ClusterDistances,
    Contrast,
    Metric,
    PairMean,
    between,
    cluster_distances,
    contrasts,
    within,
)
from lmeval_dispersion.geometry.spectrum import (
    Spectrum,
    effective_rank,
    spectrum,
)
from lmeval_dispersion.geometry.vectors import Array, unit_rows, valid_rows

__all__ = [
    "METRICS",
    "Array",
    "ClusterDistances",
    "Contrast",
    "Dispersion",
    "Estimate",
    "Metric",
    "PairMean",
    "Spectrum",
    "between",
    "cluster_distances",
    "contrasts",
    "contributions",
    "dispersion",
    "dispersion_estimate",
    "effective_rank",
    "spectrum",
    "streamed_dispersion_estimate",
    "unit_rows",
    "valid_rows",
    "vendi_score",
    "within",
]
