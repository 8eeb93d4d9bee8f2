"""Padding and packed documents, from the arguments of a forward pass or as told."""

import pytest
import torch
from tiny_decoders import tiny_gpt2, tiny_llama, tokens
from torch import nn

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.training import losses
from lmeval_dispersion.training.regularizer import DispersionRegularizer


class Packed(nn.Module):
    """A decoder with flash-attention style arguments, which eager attention would not accept."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.norm = nn.LayerNorm(8)

    def forward(self, input_ids, seq_idx=None, cu_seq_lens_q=None):
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)


@pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens_q", "seq_idx", "describe"])
def test_packing(form):
    ids, positions = tokens(1, 12), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    segments = (positions == 0).cumsum(-1)
    model = tiny_llama() if form == "position_ids" else Packed()
    reg = DispersionRegularizer(model, "angular_spread", weight=1.0)
    if form == "position_ids":
        states = model(ids, position_ids=positions, output_hidden_states=True).hidden_states[-1]
    elif form == "describe":
        reg.describe(segments=segments)
        states = model(ids)
    elif form == "seq_idx":
        states = model(ids, segments)  # by position
    else:
        states = model(ids, cu_seq_lens_q=torch.tensor([0, 5, 12], dtype=torch.int32))
    wanted = losses.angular_spread(states, segments=segments)
    torch.testing.assert_close(reg.pop(), wanted)
    assert abs(wanted - losses.angular_spread(states)) > 1e-6


def test_a_mask_that_says_nothing_is_refused():
    model, ids = tiny_gpt2(), tokens(2, 6)
    reg = DispersionRegularizer(model)
    four = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    model(ids, attention_mask=four)
    with pytest.raises(GeometryError, match="describe"):
        reg.pop()
    reg.describe(mask=torch.ones(2, 6))
    model(ids, attention_mask=four)
    assert reg.pop() is not None
