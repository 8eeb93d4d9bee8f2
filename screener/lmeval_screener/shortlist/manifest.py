"""The manifest of a short list: the whole screening as it was before any model ran, with the choice.

A verdict needs all candidates, those that were not chosen too, and the probability with which each was. The
manifest is written before the results exist, so that no choice can follow them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.version import __version__
from lmeval_screener.screened import Screened
from lmeval_screener.shortlist.choice import Shortlist
from lmeval_screener.targets import Target, label

SCHEMA = "screen-checkpoints-shortlist/2"
_READ = (SCHEMA, "screen-checkpoints-shortlist/1")
FILE = "manifest.json"


@dataclass(frozen=True)
class Candidate:
    """One checkpoint of the screening.

    Attributes:
        repo: Repository, or the folder.
        requested_revision: As asked for; None for the default branch or a folder.
        revision: The commit that was read; None for a folder.
        file: The GGUF file that was asked for; None for the checkpoint's own weights.
        group: Family and scale.
        rank: In the group, by G.
        chosen: ``rank``, ``tied`` or ``audit``; None where it was not to be evaluated.
        probability: With which it was to be evaluated, in [0, 1].
        G: Of the metric that ranked.
        ratio: The other figure; None where it is not known.
    """

    repo: str
    requested_revision: str | None
    revision: str | None
    file: str | None
    group: tuple[str, str]
    rank: int
    chosen: str | None
    probability: float
    G: float
    ratio: float | None = None

    @property
    def label(self) -> str:
        """``repo``, ``repo@revision`` or ``repo:file``, as it was asked for."""
        return label(self.repo, self.requested_revision, self.file)

    @property
    def target(self) -> Target:
        """The target that results are matched to."""
        return Target(self.repo, self.requested_revision, local=self.revision is None, file=self.file)


@dataclass(frozen=True)
class Manifest:
    """A screening with its short list.

    Attributes:
        domain: Name of T.
        metric: Which G ranked.
        k: How many were asked for of each group.
        audit_sample: How many others of each group were asked for at random.
        candidates: All that were screened, group by group, best first.
        place: Where it was read.
    """

    domain: str
    metric: str
    k: int
    audit_sample: int
    candidates: tuple[Candidate, ...]
    place: str


def manifest_dict(
    head: Mapping[str, Any], chosen: Shortlist, *, tasks: tuple[str, ...], command: str
) -> dict[str, Any]:
    """The manifest as plain values."""
    return {
        "schema": SCHEMA,
        "version": __version__,
        "command": command,
        **{name: head[name] for name in ("domain", "reference", "metric")},
        "tasks": list(tasks),
        **chosen.to_dict(),
        "candidates": [
            {
                "repo": _place(c),
                "requested_revision": c.requested_revision,
                "revision": c.revision,
                "file": c.file,
                "family": c.family,
                "scale": c.scale,
                "rank": c.rank,
                "chosen": chosen.why(c),
                "inclusion_probability": chosen.probability(c),
                "G": c.gaps[head["metric"]].mean,
                "ratio": None if c.ratio is None else c.ratio.mean,
            }
            for choice in chosen.groups
            for c in choice.group.checkpoints
        ],
        "failed": [
            {name: failure[name] for name in ("repo", "revision", "error", "message")}
            for failure in head["failed"]
        ],
    }


def _place(checkpoint: Screened) -> str:
    """The repository, or the whole path of a folder: results are read somewhere else."""
    is_folder = checkpoint.revision is None and "://" not in checkpoint.repo
    return str(Path(checkpoint.repo).resolve()) if is_folder else checkpoint.repo


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file, or in the folder that ``--emit`` wrote."""
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{file}: expected the manifest of a short list, got {error.strerror or error}; "
            "`screen-checkpoints … --shortlist K --emit FOLDER` writes one"
        ) from error
    except ValueError as error:
        raise UsageError(f"{file}: expected the manifest of a short list as JSON, got: {error}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema not in _READ:
        raise UsageError(
            f"{file}: expected a manifest with the schema {SCHEMA}, got {schema or 'other JSON'}; "
            "`screen-checkpoints … --shortlist K --emit FOLDER` writes one"
        )
    return manifest_of(content, str(file))


def manifest_of(content: Mapping[str, Any], place: str) -> Manifest:
    """The manifest in plain values."""
    try:
        candidates = tuple(_candidate(entry) for entry in content["candidates"])
        manifest = Manifest(
            str(content["domain"]),
            str(content["metric"]),
            int(content["k"]),
            int(content["audit_sample"]),
            candidates,
            place,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{place}: expected a whole manifest, and {type(error).__name__} {error} says that a part is "
            "missing or of another type; write it anew with --emit"
        ) from error
    if not candidates:
        raise UsageError(f"{place}: expected at least one candidate, got none; screen checkpoints first")
    return manifest


def _candidate(entry: Mapping[str, Any]) -> Candidate:
    chosen, probability = entry["chosen"], float(entry["inclusion_probability"])
    if chosen not in ("rank", "tied", "audit", None) or not 0 <= probability <= 1:
        raise ValueError(f"in chosen {chosen!r} or inclusion_probability {probability}")
    figures = entry.get("scores", entry)  # version 1 had more figures beside G
    gap, ratio = float(figures["G"]), figures.get("ratio")
    if not math.isfinite(gap):
        raise ValueError("in a G that is not finite")
    return Candidate(
        str(entry["repo"]),
        entry["requested_revision"],
        entry["revision"],
        entry["file"],
        (str(entry["family"]), str(entry["scale"])),
        int(entry["rank"]),
        chosen,
        probability,
        gap,
        None if ratio is None else float(ratio),
    )
