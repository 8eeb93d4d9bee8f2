"""Figures of checkpoints that might order them: G by the public screener, its variants, its rivals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lmeval_screener import Screened
from numpy.typing import NDArray

from benchmarks.validity.decoder import stored_tensors
from lmeval_dispersion import screen
from lmeval_dispersion.geometry import between, within

DOMAINS = ("math", "code", "legal")
NULL_SETS = 40  # random token sets for the null
FEWEST_TAIL = 10  # eigenvalues in the tail of a power law

Rows = NDArray[np.float64]


def effective_rank(matrix: Rows) -> float:
    """exp of the entropy of the normalised singular values (Roy and Vetterli 2007)."""
    values = np.linalg.svd(matrix, compute_uv=False)
    shares = values / values.sum()
    return float(np.exp(-(shares * np.log(shares + 1e-30)).sum()))


def power_law_exponent(matrix: Rows) -> float:
    """Alpha of the tail of a matrix's eigenvalues, as WeightWatcher has it (Martin, Peng, Mahoney 2021).

    Eigenvalues of WᵀW; for every possible start of the tail the maximum-likelihood exponent
    1 + n / Σ ln(x / x_min) of Clauset, Shalizi and Newman (2009); the start with the smallest
    Kolmogorov-Smirnov distance is taken.
    """
    values = np.sort(np.linalg.svd(matrix, compute_uv=False) ** 2)
    values = values[values > 1e-12]
    best = (np.inf, float("nan"))
    for start in range(len(values) - FEWEST_TAIL):
        tail = values[start:]
        logs = np.log(tail / tail[0])
        if logs.sum() <= 0:
            continue
        alpha = 1 + len(tail) / logs.sum()
        fitted = 1 - (tail / tail[0]) ** (1 - alpha)
        distance = np.abs(fitted - np.arange(len(tail)) / len(tail)).max()
        best = min(best, (float(distance), float(alpha)))
    return best[1]


def null_gaps(rows: Rows, reference: list[int], pool: NDArray[np.int64], size: int) -> Rows:
    """Cosine G of random sets of ``size`` trained tokens against the same everyday words."""
    rng = np.random.default_rng(0)
    drawn, others = (
        part / np.linalg.norm(part, axis=1, keepdims=True) for part in (rows[pool], rows[reference])
    )
    inside, across = 1 - drawn @ drawn.T, (1 - drawn @ others.T).mean(1)
    upper = np.triu_indices(min(size, len(pool)), 1)
    found = []
    for _ in range(NULL_SETS):
        chosen = rng.choice(len(pool), min(size, len(pool)), replace=False)
        found.append(inside[np.ix_(chosen, chosen)][upper].mean() + across[chosen].mean())
    return np.array(found)


def screened(folders: list[Path]) -> dict[str, dict[Path, Screened]]:
    """Every folder by every domain, through the public function.

    Raises:
        RuntimeError: A folder could not be screened.
    """
    found: dict[str, dict[Path, Screened]] = {}
    for domain in DOMAINS:
        result = screen([str(folder) for folder in folders], domain=domain)
        if result.failed:
            raise RuntimeError("; ".join(f"{failed.label}: {failed.message}" for failed in result.failed))
        found[domain] = {Path(c.repo): c for c in result.checkpoints}
    return found


def measured(folders: list[Path], common: NDArray[np.int64]) -> list[dict[str, float]]:
    """All figures of each folder, by name; those of a domain end in ``_math``, ``_code`` or ``_legal``."""
    by_domain = screened(folders)
    found = []
    for folder in folders:
        tensors = {name: t.numpy().astype(np.float64) for name, t in stored_tensors(folder).items()}
        rows = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        gamma = tensors["model.norm.weight"]
        norms = np.linalg.norm(rows, axis=1)
        row: dict[str, float] = {
            "norm_all": float(norms.mean()),
            "effective_rank": effective_rank(rows),
            "alpha_head": power_law_exponent(rows),
            "alpha_mean": float(
                np.mean(
                    [
                        power_law_exponent(t)
                        for name, t in tensors.items()
                        if t.ndim == 2 and "embed" not in name
                    ]
                )
            ),
        }
        for domain, screenings in by_domain.items():
            own = screenings[folder]
            t = [token.id for token in own.tokens.domain_tokens]
            r = [token.id for token in own.tokens.reference_tokens]
            cosine, euclid = own.gaps["cosine"], own.gaps["euclidean"]
            folded = rows * gamma
            centred = rows - rows[common].mean(0)
            centred_folded = folded - folded[common].mean(0)
            null = null_gaps(rows, r, np.setdiff1d(common, [*t, *r]), len(t))
            row |= {
                f"cosine_{domain}": cosine.mean,
                f"cosine_se_{domain}": cosine.se,
                f"euclidean_{domain}": euclid.mean,
                f"within_T_{domain}": cosine.within_domain.mean,
                f"between_{domain}": cosine.between.mean,
                "within_R": cosine.within_reference.mean,
                "euclidean_within_R": euclid.within_reference.mean,
                f"centred_{domain}": within(centred[t]).mean + between(centred[t], centred[r]).mean,
                f"ratio_folded_{domain}": own.ratio.mean if own.ratio else float("nan"),
                f"ratio_cosine_{domain}": cosine.within_domain.mean / cosine.within_reference.mean,
                f"folded_{domain}": within(folded[t]).mean + between(folded[t], folded[r]).mean,
                f"centred_folded_{domain}": within(centred_folded[t]).mean
                + between(centred_folded[t], centred_folded[r]).mean,
                f"euclidean_over_R_{domain}": euclid.mean / euclid.within_reference.mean,
                f"null_difference_{domain}": cosine.mean - float(null.mean()),
                f"null_z_{domain}": (cosine.mean - float(null.mean())) / float(null.std(ddof=1)),
                f"norm_T_{domain}": float(norms[t].mean()),
                "norm_R": float(norms[r].mean()),
            }
        found.append({name: round(float(value), 6) for name, value in row.items()})
    return found
