"""States and distances as loops over one text at a time, from transformers' own `hidden_states`."""

from __future__ import annotations

import numpy as np
import tiny_models
import torch

from lmeval_dispersion.model.loading import load_model
from lmeval_dispersion.model.texts import Texts


def hidden_states(model, tokens):
    """Every depth's states of one text, as transformers returns them, float64."""
    with torch.no_grad():
        out = load_model(model).model(torch.tensor([tokens]), output_hidden_states=True)
    return [h[0].double().numpy() for h in out.hidden_states]


def token_ids(data):
    return [[tiny_models.VOCABULARY[w] for w in item.text.split()] for item in Texts(data)]


def mean_pair_distance(vectors):
    total = count = 0
    for i in range(len(vectors)):
        for j in range(i):
            a, b = vectors[i], vectors[j]
            total += 1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            count += 1
    return total / count
