"""The figure that orders checkpoints, as a family's file or a user names it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

RankBy = Literal["gap", "ratio"]
#: The distance of G, as `lmeval_dispersion.geometry.Metric`, which imports NumPy.
Distance = Literal["cosine", "euclidean"]
#: Their names in sentences.
DISTANCES = {"cosine": "cosine", "euclidean": "Euclidean"}


class Order(NamedTuple):
    """The figure that orders, ``ratio`` or ``gap`` for G, and the distance of G; None where nobody says."""

    rank_by: RankBy | None = None
    metric: Distance | None = None

    def over(self, other: Order) -> Order:
        """This order, completed by another where it says nothing.

        >>> Order("gap").over(Order("ratio", "euclidean"))
        Order(rank_by='gap', metric='euclidean')
        """
        return Order(self.rank_by or other.rank_by, self.metric or other.metric)

    @property
    def figure(self) -> str:
        """The figure in words: ``ratio``, ``G (Euclidean)``; empty where nobody says."""
        if self.rank_by != "gap":
            return self.rank_by or ""
        return f"G ({DISTANCES[self.metric]})" if self.metric else "G"


#: Nobody says: each family's own order, else the ratio, and the cosine distance of G.
UNSAID = Order()
#: The order of checkpoints that are in no family.
BY_RATIO = Order("ratio", "cosine")


def stored_order(rank_by: Any, metric: Any) -> Order:
    """The order in a file's two values; a value that is neither known nor None is unsaid."""
    return Order(
        rank_by if rank_by in get_args(RankBy) else None,
        metric if metric in get_args(Distance) else None,
    )
