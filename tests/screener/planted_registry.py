"""A registry of many siblings whose figures are planted: one is read, the others differ from it at random."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
from hub_server import HubServer
from lmeval_screener import screen

from lmeval_dispersion.installation import data_folder


def plant(
    place: Path,
    count: int,
    hub: HubServer | None = None,
    *,
    spread: float = 0.3,
    sketches: bool = True,
) -> None:
    """A registry of ``count`` siblings, which a Hub lists at their commits as ``org/*``.

    ``spread`` is the relative standard deviation of their figures. Without ``sketches`` they claim no copies.
    """
    model, draw = data_folder("demo") / "sums-10", np.random.default_rng(0)
    screen([str(model)], registry=place)
    with closing(sqlite3.connect(place)) as connection, connection:
        connection.row_factory = sqlite3.Row
        rows = {
            t: dict(connection.execute(f"SELECT * FROM {t}").fetchone())
            for t in ("results", "seen")
        }
        numbers = np.frombuffer(rows["results"]["numbers"])
        sketch = np.frombuffer(rows["results"]["sketch"], "<f4")
        for number in range(count - 1):
            name = f"org/model-{number:05d}"
            commit = hub.add(name, model) if hub else "0" * 40
            values = numbers * (1 + draw.normal(0, spread)) + draw.normal(0, 1e-4, len(numbers))
            changed = {
                "repo": name,
                "revision": commit,
                "numbers": values.tobytes(),
                "sketch": None,
            }
            if sketches:
                changed["sketch"] = (
                    draw.bytes(48) + (sketch[12:] * draw.normal(1, spread)).tobytes()
                )
            for table, row in rows.items():
                row |= {"identity": f"hf://{name}", "state": commit}
                row |= changed if table == "results" else {}
                marks = ", ".join("?" * len(row))
                connection.execute(
                    f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", [*row.values()]
                )
