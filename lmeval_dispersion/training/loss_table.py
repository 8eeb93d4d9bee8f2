"""The losses by name, without torch: `--loss` of ``dispersion train`` and the table of the reference page."""

from __future__ import annotations

from typing import NamedTuple


class LossRow(NamedTuple):
    """A loss in docs/reference/training.md, in Markdown."""

    value: str
    range: str
    pairs: str
    source: str


#: Name of a function of :mod:`lmeval_dispersion.training.losses` -> how the page describes it.
LOSS_TABLE = {
    "push_away": LossRow("−mean of 1 − cos", "−1 orthogonal on average, 0 parallel", "batch", "RD 3.4"),
    "cross_domain_push_away": LossRow(
        "the same over tokens of different domains", "−2 … 0", "between domains", "RD 3.4"
    ),
    "squeeze": LossRow("+ mean of 1 − cos: the ablation", "0 … 1", "batch", "RD B.4.2"),
    "angular_spread": LossRow(
        "log mean exp(−D/τ), D = arccos(cos)/π", "−1/(2τ) orthogonal, 0 parallel", "sequence", "LD"
    ),
    "orthogonalization": LossRow(
        "mean of max(0, ½ − D)²", "0 nothing below a right angle, ¼ parallel", "sequence", "LD"
    ),
    "l2_repel": LossRow(
        r"log mean exp(−\|z_i − z_j\|²/τ) + `norm_weight` · mean of z²",
        "≤ 0 before the norm term",
        "sequence",
        "LD",
    ),
    "decorrelation": LossRow(
        "mean squared correlation of two features", "0 … 1", "over each sequence's tokens", "LD"
    ),
}
