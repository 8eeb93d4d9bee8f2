"""States, options and gradients that the tests of the losses share."""

import torch

B, T, D = 3, 9, 6


def random_states(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def cases():
    z = random_states(B, T, D)
    one = z.clone()
    mask = torch.ones(B, T, dtype=torch.bool)
    ragged = mask.clone()
    ragged[0, 6:] = False  # right padding
    ragged[1, :4] = False  # left padding
    condensed = random_states(1, 1, D, seed=1) + 0.01 * z
    opposite = z.clone()
    opposite[:, 1] = -2.0 * opposite[:, 0]
    duplicated = z.clone()
    duplicated[:, 3:6] = duplicated[:, :1]
    zeros = z.clone()
    zeros[:, 2] = 0.0
    lonely = mask.clone()
    lonely[1, 1:] = False  # one token
    lonely[2] = False  # none
    packed = torch.tensor(
        [[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 7], [0, 1, 0, 1, 0, 1, 0, 1, 0]]
    )
    nothing = torch.zeros(B, T, dtype=torch.bool)
    return {
        "random": (one, {}),
        "condensed": (condensed, {}),
        "opposite": (opposite, {}),
        "duplicated": (duplicated, {}),
        "zero vector": (zeros, {}),
        "padded": (z, {"mask": ragged}),
        "one token": (z, {"mask": lonely}),
        "packed": (z, {"segments": packed}),
        "packed and padded": (zeros, {"segments": packed, "mask": ragged}),
        "all padding": (z, {"mask": nothing}),
        "whole batch": (z, {"mask": ragged, "pairs": "batch"}),
    }


VARIANTS = {
    "push_away": ("push_away", {}),
    "push_away in sequences": ("push_away", {"pairs": "sequence"}),
    "squeeze": ("squeeze", {}),
    "angular_spread": ("angular_spread", {}),
    "angular_spread tau 0.1": ("angular_spread", {"tau": 0.1}),
    "orthogonalization": ("orthogonalization", {}),
    "orthogonalization margin 0.3": ("orthogonalization", {"margin": 0.3}),
    "l2_repel": ("l2_repel", {}),
    "l2_repel median": ("l2_repel", {"tau": "median", "norm_weight": 0.0}),
    "decorrelation": ("decorrelation", {}),
    "decorrelation tokens": ("decorrelation", {"axis": "tokens"}),
}


def value_and_gradient(loss, z, **options):
    z = z.detach().clone().requires_grad_()
    value = loss(z, **options)
    (gradient,) = torch.autograd.grad(value, z)
    return value.detach(), gradient
