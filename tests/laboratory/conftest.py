"""A tiny model and texts that the laboratory's tests share."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="session")
def model(place):
    return tiny_models.saved(place / "model", tiny_models.llama())


@pytest.fixture(scope="session")
def data(place):
    rng = np.random.default_rng(0)
    rows = [" ".join(f"w{i}" for i in rng.zipf(1.4, 30) % 90) for _ in range(60)]
    return tiny_models.text_file(place / "text.jsonl", rows)


@pytest.fixture(scope="session")
def repeating(place):
    rng = np.random.default_rng(3)
    phrases = [[int(i) for i in rng.integers(0, 90, 4)] for _ in range(4)]
    rows = []
    for _ in range(80):
        row = []
        for _ in range(3):
            row += [*rng.integers(0, 90, 9).tolist(), *phrases[rng.integers(4)]]
        rows.append(" ".join(f"w{i}" for i in row))
    return tiny_models.text_file(place / "repeating.jsonl", rows)
