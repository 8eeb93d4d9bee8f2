"""The figure that ranks checkpoints, as a family's file or a user names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

from lmeval_dispersion.arguments import Option
from lmeval_dispersion.options import Once

RankBy = Literal["gap", "ratio"]
#: The distance of G, as `lmeval_dispersion.geometry.Metric`, which imports NumPy.
Distance = Literal["cosine", "euclidean"]
#: Their names in sentences.
DISTANCES = {"cosine": "cosine", "euclidean": "Euclidean"}


class Order(NamedTuple):
    """Which figure ranks checkpoints, and in which distance G is measured.

    Attributes:
        rank_by: The figure, ``ratio``, or ``gap`` for G (see `lmeval_screener.figures`); None to
            leave the choice to the family's file or the default.
        metric: Distance of G, ``cosine`` or ``euclidean``; None to leave the choice likewise.
    """

    rank_by: RankBy | None = None
    metric: Distance | None = None

    def over(self, other: Order) -> Order:
        """Return this order, with the fields that are None taken from ``other``.

        >>> Order("gap").over(Order("ratio", "euclidean"))
        Order(rank_by='gap', metric='euclidean')
        """
        return Order(self.rank_by or other.rank_by, self.metric or other.metric)

    @property
    def figure(self) -> str:
        """The figure in words, such as ``ratio`` or ``G (Euclidean)``; empty if not chosen."""
        if self.rank_by != "gap":
            return self.rank_by or ""
        return f"G ({DISTANCES[self.metric]})" if self.metric else "G"


#: Nobody says: each family's own order, else the ratio, and the cosine distance of G.
UNSAID = Order()
#: The order of checkpoints that are in no family.
BY_RATIO = Order("ratio", "cosine")


def stored_order(rank_by: Any, metric: Any) -> Order:
    """Return the order given by two values that were read from a file.

    A value that is not a known figure or distance becomes None.
    """
    return Order(
        rank_by if rank_by in get_args(RankBy) else None,
        metric if metric in get_args(Distance) else None,
    )


def _figure(text: str) -> str:
    """The value of ``--rank-by``, which may be called G."""
    return "gap" if text.lower() == "g" else text


@dataclass(frozen=True, kw_only=True)
class RankedBy:
    """How a user wants checkpoints to be ranked.

    Attributes:
        rank_by: Figure that ranks checkpoints: the ratio, or the gap G. Default: that of the
            family's file, else ratio.

            Both are described in :mod:`lmeval_screener.figures`. Chances of being the best are
            known only for an order by the ratio.
        metric: Distance of G. Default: the family's, else cosine.

            The distance between two rows of the output projection, of which G is a mean.
        base: The checkpoints' base. Default: the one they name.

            One of the checkpoints, from which the others were trained. They are compared with it,
            and it is never recommended.
    """

    rank_by: Annotated[RankBy | None, Option(type=_figure)] = None
    metric: Distance | None = None
    base: Annotated[str | None, Option("CHECKPOINT", action=Once)] = None

    @property
    def order(self) -> Order:
        """The order that these arguments ask for."""
        return Order(self.rank_by, self.metric)
