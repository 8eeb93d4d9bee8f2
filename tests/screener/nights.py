"""Nights of one registry: models that come and go, and the command that is run once a night."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from lmeval_screener.cli import main as screen_checkpoints

from lmeval_dispersion.cli import main
from lmeval_dispersion.installation import data_folder

#: The demo's models by their G in math: 0.878, 0.982, 1.027, 1.112, 1.181. The last three differ clearly.
MODELS = {
    "worst": "sums-00",
    "low": "sums-20",
    "mid": "sums-30",
    "good": "sums-45",
    "best": "sums-80",
}


def model(place, name):
    """One of the demo's models, in place of what was there."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(data_folder("demo") / MODELS[name], place)
    for file in place.iterdir():
        os.utime(file)
    return place


def mean_of(place, *names):
    """A model whose weights are the mean of some."""
    model(place, names[0])
    for file in place.glob("*.safetensors"):
        parts = [(data_folder("demo") / MODELS[name] / file.name).read_bytes() for name in names]
        head = 8 + int.from_bytes(
            parts[0][:8], "little"
        )  # of all alike; behind it all numbers are BF16
        values = [np.frombuffer(part[head:], "<u2").astype("<u4") << 16 for part in parts]
        mean = np.mean([value.view("<f4") for value in values], axis=0, dtype="<f4")
        file.write_bytes(parts[0][:head] + (mean.view("<u4") >> 16).astype("<u2").tobytes())
    return place


def a_day_passes(store):
    """All that the registry says happened a day earlier."""

    def earlier(text):
        return text and str(datetime.datetime.fromisoformat(text) - datetime.timedelta(1))

    with closing(sqlite3.connect(store)) as connection, connection:
        connection.create_function("earlier", 1, earlier)
        connection.execute(
            "UPDATE runs SET started = earlier(started), ended = earlier(ended), "
            "announced = earlier(announced), since = earlier(since)"
        )
        connection.execute("UPDATE seen SET first = earlier(first), last = earlier(last)")
        connection.execute("UPDATE names SET renamed = earlier(renamed)")


class Nights:
    """Nightly runs of one command into one registry."""

    def __init__(self, in_process, hub, tmp_path):
        self.store, self.folder, self.hub = tmp_path / "nightly.db", tmp_path, hub
        self._in_process, self._homes = in_process, itertools.count()

    def run(self, *words, main=screen_checkpoints):
        return self._in_process(
            *words, endpoint=self.hub.endpoint, home=f"h{next(self._homes)}", main=main
        )

    def __call__(self, *names, since="last", more=()):
        """One night: status, sentences without the time, and the moves; a day passes."""
        done = self.run(
            *names, "--registry", self.store, "--since", since, "--format", "json", *more
        )
        content = json.loads(done.stdout)
        if self.store.exists():
            a_day_passes(self.store)
        said = [s.partition(": ")[2] if s.startswith("Since ") else s for s in content["answer"]]
        return done.returncode, said, {row["checkpoint"]: row for row in content["rows"]}

    def ask(self, *words):
        return self.run("registry", words[0], self.store, *words[1:], main=main)

    def rows(self, *words):
        """What the registry answers to a query, by checkpoint."""
        rows = json.loads(self.ask("query", *words, "--format", "json").stdout)["rows"]
        return {row["checkpoint"]: row for row in rows}


@pytest.fixture
def night(in_process, hub, tmp_path):
    return Nights(in_process, hub, tmp_path)


def texts(moves):
    return {name: (row["what"], row["text"]) for name, row in moves.items()}
