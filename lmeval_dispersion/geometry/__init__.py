"""Distances between vectors, and the dispersion of a set of vectors: their mean distance.

Arrays are numpy, ``x`` has shape (n, d): ``n`` vectors of width ``d``, any float dtype. Arithmetic is in
float64. Cosine distance is ``1 - u_i.u_j`` in [0, 2] with ``u = x/|x|``; Euclidean distance is taken on raw
rows. A mean distance that is not defined raises an error: 0 would mean that all vectors are alike.

Mean pair distances over n vectors cost O(n d) for the cosine by closed forms and O(n^2 d) in blocks for the
Euclidean. Pairs share vectors, so the papers' error (sd over pairs / sqrt(pairs)) is too small; it is
given as ``se_pairs``. ``se`` is a jackknife over vectors. This package's modules are private; import the
names from here.

Source: "On the Predictive Power of Representation Dispersion in Language Models" (ICLR 2026), cited
as RD: eq. 1, sections 2.3 and 3.2, appendix A.5.
"""

from lmeval_dispersion.geometry.dispersion import Dispersion as Dispersion
from lmeval_dispersion.geometry.dispersion import Estimate as Estimate
from lmeval_dispersion.geometry.dispersion import Spectrum as Spectrum
from lmeval_dispersion.geometry.dispersion import contributions as contributions
from lmeval_dispersion.geometry.dispersion import dispersion as dispersion
from lmeval_dispersion.geometry.dispersion import dispersion_estimate as dispersion_estimate
from lmeval_dispersion.geometry.dispersion import effective_rank as effective_rank
from lmeval_dispersion.geometry.dispersion import spectrum as spectrum
from lmeval_dispersion.geometry.dispersion import vendi_score as vendi_score
from lmeval_dispersion.geometry.pairs import METRICS as METRICS
from lmeval_dispersion.geometry.pairs import Array as Array
from lmeval_dispersion.geometry.pairs import Contrast as Contrast
from lmeval_dispersion.geometry.pairs import Metric as Metric
from lmeval_dispersion.geometry.pairs import PairMean as PairMean
from lmeval_dispersion.geometry.pairs import between as between
from lmeval_dispersion.geometry.pairs import contrasts as contrasts
from lmeval_dispersion.geometry.pairs import unit_rows as unit_rows
from lmeval_dispersion.geometry.pairs import valid_rows as valid_rows
from lmeval_dispersion.geometry.pairs import within as within
