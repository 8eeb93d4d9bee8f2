"""Figures of checkpoints that might order them: G by the public screener, its variants, its rivals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lmeval_screener import Screened

from benchmarks.validity.decoder import stored_tensors
from lmeval_dispersion import screen

DOMAINS = ("math", "code", "legal")


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


def measured(folders: list[Path]) -> list[dict[str, float]]:
    """All figures of each folder, by name; those of a domain end in ``_math``, ``_code`` or ``_legal``."""
    by_domain = screened(folders)
    found = []
    for folder in folders:
        tensors = stored_tensors(folder)
        rows = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).numpy()
        norms = np.linalg.norm(rows.astype(np.float64), axis=1)
        row: dict[str, float] = {"norm_all": float(norms.mean())}
        for domain, screenings in by_domain.items():
            own = screenings[folder]
            t = [token.id for token in own.resolution.domain]
            r = [token.id for token in own.resolution.reference]
            cosine, euclid = own.gaps["cosine"], own.gaps["euclidean"]
            row |= {
                f"cosine_{domain}": cosine.mean,
                f"cosine_se_{domain}": cosine.se,
                f"euclidean_{domain}": euclid.mean,
                f"within_T_{domain}": cosine.within_domain.mean,
                "within_R": cosine.within_reference.mean,
                "euclidean_within_R": euclid.within_reference.mean,
                f"ratio_folded_{domain}": own.ratio.mean if own.ratio else float("nan"),
                f"norm_T_{domain}": float(norms[t].mean()),
                "norm_R": float(norms[r].mean()),
            }
        found.append({name: round(float(value), 6) for name, value in row.items()})
    return found
