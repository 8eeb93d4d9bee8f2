"""The losses once more, pair by pair in float64, straight from the table of definitions.

Nothing here is shared with the product: groups are lists of vectors, every pair is visited, and autograd
differentiates the loops.
"""

import math

import torch

GUARD = 1e-6
EPSILON = 0.01  # of LD's released code


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


def released_angle(a, b, cut):
    """With the length raised by EPSILON, and the cosine cut; beyond it the slope is that at the cut."""
    c = (a * b).sum() / ((a.norm() + EPSILON) * (b.norm() + EPSILON))
    c = c + (c.clamp(cut - 1, 1 - cut) - c).detach()
    return torch.arccos(c) / math.pi


def released_cut(released):
    return 0.25 if released is True else released


def ordered_pairs(vectors):
    return [(a, b) for i, a in enumerate(vectors) for j, b in enumerate(vectors) if i != j]


def mean(values):
    return sum(values) / len(values) if values else None


def average(values, z):
    values = [v for v in values if v is not None]
    return mean(values) if values else (z * 0).nan_to_num().sum()


def by_group(default):
    """Makes a loss from the value of one group; ``default`` is the loss's own choice of pairs."""

    def made(value):
        def loss(z, mask=None, segments=None, pairs=default, **options):
            return average(
                [value(points, **options) for points in groups(z, mask, segments, pairs)], z
            )

        return loss

    return made


@by_group("batch")
def push_away(points):
    return mean([cosine(a, b) - 1 for a, b in ordered_pairs(directed(points))])


def squeeze(z, **options):
    return -push_away(z, **options)


def cross_domain_push_away(z, domains, mask=None):
    points = [
        (int(domains[i]), v)
        for i in range(len(z))
        for g in groups(z[i : i + 1], None if mask is None else mask[i : i + 1])
        for v in directed(g)
    ]
    cosines = [cosine(a, b) - 1 for da, a in points for db, b in points if da != db]
    return average([mean(cosines)], z)


@by_group("sequence")
def angular_spread(points, tau=1.0, released=False):
    if released:
        cut = released_cut(released)
        terms = [
            torch.exp(-released_angle(a, b, cut) / tau + EPSILON) for a, b in ordered_pairs(points)
        ]
        return mean(terms).log() if terms else None
    terms = [torch.exp(-angle(a, b) / tau) for a, b in ordered_pairs(directed(points))]
    return mean(terms).log() if terms else None


@by_group("sequence")
def orthogonalization(points, margin=0.5, released=False):
    if released:
        cut = released_cut(released)
        return mean(
            [
                (margin - released_angle(a, b, cut)).clamp(min=0).square()
                for a, b in ordered_pairs(points)
            ]
        )
    return mean(
        [(margin - angle(a, b)).clamp(min=0).square() for a, b in ordered_pairs(directed(points))]
    )


@by_group("sequence")
def l2_repel(points, tau=1.0, norm_weight=0.1, released=False):
    gaps = [(a - b).square().sum() for a, b in ordered_pairs(points)]
    if not gaps:
        return None
    if released:
        every = [(a - b).square().sum() for a in points for b in points]
        terms = torch.stack([-gap / tau + EPSILON for gap in every])
        value = torch.logsumexp(terms, 0) - 2 * math.log(len(points))
        return value + norm_weight * mean([v.square().mean() for v in points])
    scale = (
        sorted(float(gap.detach()) for gap in gaps)[(len(gaps) - 1) // 2]
        if tau == "median"
        else tau
    )
    value = 0.0
    if scale:
        value = torch.logsumexp(torch.stack([-gap / scale for gap in gaps]), 0) - math.log(
            len(gaps)
        )
    return value + norm_weight * mean([v.square().mean() for v in points])


@by_group("sequence")
def decorrelation(points, axis="features", released=False):
    table = torch.stack(points)  # (points, features)
    columns = list(table.T) if axis == "features" and not released else points
    centred = [c - c.mean() for c in columns]
    varied = [
        c
        for c, raw in zip(centred, columns, strict=True)
        if float(length(c.detach())) > 1e-9 * float(length(raw.detach()))
    ]
    return mean([cosine(a, b).square() for a, b in ordered_pairs(varied)])
