"""Measured evidence that reports cite: how often short lists and rankings were right."""

from __future__ import annotations

from dataclasses import dataclass

#: Gain in accuracy by racing all instead of the screen's list; 95 % interval; data.
LOST: tuple[float, float, float, str] | None = (
    0.001,
    -0.001,
    0.003,
    "6 groups of 32 fine-tunes of small models, and nothing on 6 groups of 24 models trained on random "
    "data mixtures",
)
#: Loss of accuracy by leaving out two thirds of a long list by 25 answers; 95 % interval; data.
CUT = (0.002, -0.004, 0.009, "adapters")

_LEAST_CHANCE = 0.6  # of the lowest bin in `Slope.right`

# --- order by the ratio -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """How often a short list held a checkpoint whose accuracy is within 0.01 of the best one's.

    Attributes:
        groups: Description of the groups of checkpoints.
        held: Number of cells (a group on one task) whose short list held such a checkpoint.
        cells: Number of all cells.
        measured: Date of the measurement.
        fresh: Whether the groups were trained to test a `Slope` that had been fitted before. If
            False, the slope was fitted to these groups, or they are parts of other groups.
    """

    groups: str
    held: int
    cells: int
    measured: str
    fresh: bool = False


@dataclass(frozen=True)
class Slope:
    """How strongly a screen's ranks predict accuracy: the slope k of `lmeval_screener.chance`.

    The ranks are by the ratio: how far apart the output layer's rows of a task's answer tokens are,
    relative to those of everyday words.

    Attributes:
        kind: The kind of checkpoints on which the slope was measured, such as ``fine-tunes``.
        k: The slope.
        low: Lower end of the 95 % interval of k over groups; for a user's own results, over
            checkpoints.
        high: Upper end of that interval.
        spread: Standard deviation of k between cells, each a group on one task.
        measured: Date of the measurement.
        groups: Number of groups; for a user's own results, number of checkpoints.
        fresh: k and the two ends of its interval for groups that were trained later, to test the
            slope; None without such groups.
        held: How often short lists held a checkpoint within 0.01 of the best accuracy.
        right: For each range of predicted chances, its upper end and the share of the fresh groups'
            pairs in that range that the screen ordered correctly.
    """

    kind: str
    k: float
    low: float
    high: float
    spread: float
    measured: str
    groups: int
    fresh: tuple[float, float, float] | None = None
    held: tuple[Held, ...] = ()
    right: tuple[tuple[float, float], ...] = ()

    def was_right(self, chance: float) -> float | None:
        """Return the share of pairs that the screen ordered correctly where it predicted ``chance``.

        The pairs are those whose predicted chances lie in the same range as ``chance``. The share is
        None if it was not measured, as for every chance below 0.6.
        """
        if chance < _LEAST_CHANCE:
            return None
        for highest, share in self.right:
            if chance <= highest:
                return share
        return None

    def counts(self, last: int, chance: float, *, is_list: bool) -> str:
        """Return a clause, without a full stop, on how often a screen of our own models was right.

        It gives the number of short lists that held a checkpoint within 0.01 of the best accuracy,
        and the share of pairs that were ordered correctly (see `was_right`). What was not measured
        is left out; if neither was measured, the clause is "".

        Args:
            last: The rank that is compared with rank 1.
            chance: The chance that the checkpoint at rank 1 is better than the one at ``last``.
            is_list: Whether ranks 1 to ``last`` are a short list of the default length. If not,
                short lists are left out.
        """
        clauses = []
        for row in self.held:
            if is_list and row.fresh:
                clauses.append(
                    f"such a list held a checkpoint within 0.01 of the best accuracy in {row.held} "
                    f"of {row.cells} cases, each a group on one task ({row.groups})"
                )
        right = self.was_right(chance)
        if right is not None:
            clauses.append(
                f"of pairs as far apart as ranks 1 and {last}, {100 * right:.0f} % were ordered "
                "correctly"
            )
        if not clauses:
            return ""
        return f"on our own {self.kind} ({OUR_MODELS}), {'; '.join(clauses)}"


FINE_TUNES = "fine-tunes"
FROM_SCRATCH = "models trained from scratch"
#: The models of `SLOPES`: 48 wide, two layers, 1,400 tokens (benchmarks/validity/siblings.yaml).
OUR_MODELS = "models of about 0.2 million parameters"
#: Parameters, and numbers of siblings, for which what was counted on our own models is told.
OUR_SIZES = (50_000, 1_000_000)
OUR_GROUPS = (8, 32)
_FINE_TUNES = Slope(
    kind=FINE_TUNES,
    k=0.70,
    low=0.47,
    high=0.79,
    spread=0.35,
    measured="2026-11-23",
    groups=15,
    fresh=(0.80, 0.47, 1.13),
    held=(
        Held("15 groups of 16 to 32 fine-tunes, to which k was fitted", 38, 44, "2026-11-23"),
        Held("6 fresh groups of 32 fine-tunes", 17, 18, "2026-11-24", fresh=True),
        Held("20 draws of 8 models from each fresh group", 346, 360, "2026-11-24"),
    ),
    right=((0.7, 0.73), (0.8, 0.83), (0.9, 0.89), (0.97, 0.93), (1.0, 0.97)),
)
_FROM_SCRATCH = Slope(
    kind=FROM_SCRATCH,
    k=1.05,
    low=1.03,
    high=1.21,
    spread=0.25,
    measured="2026-11-23",
    groups=13,
    fresh=(0.98, 0.84, 1.12),
    held=(
        Held(
            "13 groups of models trained on random data mixtures, to which k was fitted",
            39,
            39,
            "2026-11-23",
        ),
        Held(
            "6 fresh groups of 24 models trained on random data mixtures",
            18,
            18,
            "2026-11-24",
            fresh=True,
        ),
        Held("20 draws of 8 models from each fresh group", 340, 360, "2026-11-24"),
    ),
    right=((0.7, 0.71), (0.8, 0.78), (0.9, 0.87), (0.97, 0.92), (1.0, 0.97)),
)
#: Kind -> slope. A group of unknown kind counts as fine-tunes, whose slope is smaller.
SLOPES = {FINE_TUNES: _FINE_TUNES, FROM_SCRATCH: _FROM_SCRATCH}
