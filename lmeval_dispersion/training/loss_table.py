"""The losses' names, without torch: `--loss` of ``dispersion train`` and the table of the reference page."""

from __future__ import annotations

#: A function of :mod:`lmeval_dispersion.training.losses` -> its value | range | pairs | source, in Markdown.
LOSS_TABLE = {
    "push_away": "−mean of 1 − cos | −1 orthogonal on average, 0 parallel | batch | RD 3.4",
    "cross_domain_push_away": "the same over tokens of different domains | −2 … 0 | between domains | RD 3.4",
    "squeeze": "+ mean of 1 − cos: the ablation | 0 … 1 | batch | RD B.4.2",
    "angular_spread": "log mean exp(−D/τ), D = arccos(cos)/π | −1/(2τ) orthogonal, 0 parallel "
    "| sequence | LD",
    "orthogonalization": "mean of max(0, ½ − D)² | 0 nothing below a right angle, ¼ parallel | sequence | LD",
    "l2_repel": r"log mean exp(−\|z_i − z_j\|²/τ) + `norm_weight` · mean of z² | ≤ 0 before the norm term "
    "| sequence | LD",
    "decorrelation": "mean squared correlation of two features | 0 … 1 | over each sequence's tokens | LD",
}
