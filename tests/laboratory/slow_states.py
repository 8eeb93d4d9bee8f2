"""States and distances as loops over one text at a time, from transformers' own `hidden_states`."""

from __future__ import annotations

import numpy as np
import tiny_models
import torch

from lmeval_dispersion.model.texts import Texts


def slow_pass(model, tokens):
    """NLL of one text's tokens after the first, and the states of every depth, float64."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    logp = out.logits[0].double().log_softmax(-1)
    nll = -logp[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    return nll, [states[0].double().numpy() for states in out.hidden_states]


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
