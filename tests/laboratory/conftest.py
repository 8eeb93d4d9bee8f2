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
    phrases = rng.integers(0, 90, (4, 4)).tolist()

    def phrase_at_the_end():
        return [*rng.integers(0, 90, 9).tolist(), *phrases[rng.integers(4)]]

    texts = ([*phrase_at_the_end(), *phrase_at_the_end(), *phrase_at_the_end()] for _ in range(80))
    return tiny_models.text_file(
        place / "repeating.jsonl", (" ".join(f"w{i}" for i in ids) for ids in texts)
    )
