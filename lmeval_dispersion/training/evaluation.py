"""Perplexity and layer-wise dispersion of a model on held-out blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lmeval_dispersion.geometry import Dispersion
from lmeval_dispersion.model.capture import Decoder, capture
from lmeval_dispersion.training.blocks import Blocks
from lmeval_dispersion.training.losses import push_away


def evaluated(model: Any, blocks: Blocks, batch: int) -> dict[str, Any]:
    """Figures of ``model`` on ``blocks`` (n, t), in float32, without touching its mode or any random state.

    Returns:
        ``perplexity``: exp of the mean negative log-likelihood over all predicted tokens, n (t - 1) of them.
        ``tokens``: for each layer the mean cosine distance between the tokens of a block, averaged over
        blocks (1 - it is LD's condensation). ``texts``: for each layer the dispersion over blocks (RD eq. 1)
        of the state at the last position that predicts a token, None for one block: the very last has no
        label in training, so that there a loss on states alone decides. Layers are the outputs of the
        blocks of the model, the last one after the final norm.
    """
    decoder = Decoder.of(model)
    names = [f"layer.{k}" for k in range(len(decoder))]
    if decoder.norm is not None:
        names[-1] = "norm"
    device = next(model.parameters()).device
    within: dict[str, float] = dict.fromkeys(names, 0.0)
    over: dict[str, Dispersion] = {}
    nll, training = 0.0, model.training

    def see(name: str, state: Tensor) -> None:
        # One mean a block: their sum is kept, so that the last, smaller batch weighs what it should.
        within[name] -= float(push_away(state, pairs="sequence")) * len(state)
        last = state[:, -2].float().cpu().numpy()
        over.setdefault(name, Dispersion(last.shape[1])).update(last)

    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), capture(model, names, see):
            for start in range(0, len(blocks), batch):
                ids = torch.as_tensor(blocks[start : start + batch], dtype=torch.long, device=device)
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
                nll += float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    finally:
        model.train(training)
    return {
        "perplexity": math.exp(min(700.0, nll / (len(blocks) * (blocks.shape[1] - 1)))),
        "tokens": [within[name] / len(blocks) for name in names],
        "texts": [over[name].mean() if len(blocks) > 1 else None for name in names],
    }
