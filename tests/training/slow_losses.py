"""The losses once more, pair by pair in float64, straight from the table of definitions.

Nothing here is shared with the product: groups are lists of vectors, every pair is visited, and autograd
differentiates the loops.
"""

import math

import torch

GUARD = 1e-6


def groups(z, mask=None, segments=None, pairs="sequence"):
    """Lists of points that form pairs with each other."""
    members = {}
    b, t, _ = z.shape
    for i in range(b):
        for j in range(t):
            if mask is not None and not mask[i, j]:
                continue
            key = 0 if pairs == "batch" else (i, 0 if segments is None else int(segments[i, j]))
            members.setdefault(key, []).append(z[i, j])
    return list(members.values())


def length(v):
    return v.square().sum().sqrt()


def directed(vectors):
    return [v for v in vectors if float(length(v.detach())) > 1e-12]


def cosine(a, b):
    return (a * b).sum() / (length(a) * length(b))


def angle(a, b):
    c = cosine(a, b)
    c = c + (c.clamp(-1 + GUARD, 1 - GUARD) - c).detach()
    return torch.arccos(c) / math.pi


def ordered_pairs(vectors):
    return [(a, b) for i, a in enumerate(vectors) for j, b in enumerate(vectors) if i != j]


def mean(values):
    return sum(values) / len(values) if values else None


def average(values, z):
    values = [v for v in values if v is not None]
    return mean(values) if values else (z * 0).nan_to_num().sum()


def push_away(z, mask=None, segments=None, pairs="batch"):
    return average(
        [
            mean([cosine(a, b) - 1 for a, b in ordered_pairs(directed(g))])
            for g in groups(z, mask, segments, pairs)
        ],
        z,
    )


def squeeze(z, **kw):
    return -push_away(z, **kw)


def cross_domain_push_away(z, domains, mask=None):
    points = [
        (int(domains[i]), v)
        for i in range(len(z))
        for g in groups(z[i : i + 1], None if mask is None else mask[i : i + 1])
        for v in directed(g)
    ]
    cosines = [cosine(a, b) - 1 for da, a in points for db, b in points if da != db]
    return average([mean(cosines)], z)


def angular_spread(z, mask=None, segments=None, pairs="sequence", tau=1.0):
    values = []
    for g in groups(z, mask, segments, pairs):
        terms = [torch.exp(-angle(a, b) / tau) for a, b in ordered_pairs(directed(g))]
        values.append(mean(terms).log() if terms else None)
    return average(values, z)


def orthogonalization(z, mask=None, segments=None, pairs="sequence", margin=0.5):
    values = []
    for g in groups(z, mask, segments, pairs):
        terms = [(margin - angle(a, b)).clamp(min=0).square() for a, b in ordered_pairs(directed(g))]
        values.append(mean(terms))
    return average(values, z)


def l2_repel(z, mask=None, segments=None, pairs="sequence", tau=1.0, norm_weight=0.1):
    values = []
    for g in groups(z, mask, segments, pairs):
        gaps = [(a - b).square().sum() for a, b in ordered_pairs(g)]
        if not gaps:
            values.append(None)
            continue
        scale = sorted(float(x.detach()) for x in gaps)[(len(gaps) - 1) // 2] if tau == "median" else tau
        if scale == 0:
            value = (z * 0).sum()
        else:
            value = torch.logsumexp(torch.stack([-gap / scale for gap in gaps]), 0) - math.log(len(gaps))
        values.append(value + norm_weight * mean([v.square().mean() for v in g]))
    return average(values, z)


def decorrelation(z, mask=None, segments=None, pairs="sequence", axis="features"):
    values = []
    for g in groups(z, mask, segments, pairs):
        table = torch.stack(g)  # (points, features)
        columns = list(table.T) if axis == "features" else g
        centred = [c - c.mean() for c in columns]
        varied = [
            c
            for c, raw in zip(centred, columns, strict=True)
            if float(length(c.detach())) > 1e-9 * float(length(raw.detach()))
        ]
        values.append(mean([cosine(a, b).square() for a, b in ordered_pairs(varied)]))
    return average(values, z)
