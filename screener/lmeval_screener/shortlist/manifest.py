"""The short list on disk: the folder for lm-eval with its manifest, and the manifest read again.

A verdict needs all candidates, chosen or not, and the probability with which each was chosen. The manifest is
written before the results exist, so that no choice can depend on them.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import yaml

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.files import FULL, read_json
from lmeval_dispersion.installation import __version__
from lmeval_dispersion.layouts import Place, PlainName, Text, checked
from lmeval_screener.screened import Screened
from lmeval_screener.shortlist.choice import Shortlist
from lmeval_screener.shortlist.loading import on_base
from lmeval_screener.targets.names import Target, labelled
from lmeval_screener.tokens.sets import TokenSet

SCHEMA = "screen-checkpoints-shortlist/2"
FILE = "manifest.json"
DOWNLOADED = "adapters"  # folder with the list's Hub adapters, each under its name
_REPAIR = "write the list again"
_RUN = """\
#!/usr/bin/env bash
# Races the short list in manifest.json on lm-eval's tasks.
# To judge the screen by the result: dispersion verify race (the folder that this script writes)
# Arguments go to `dispersion race`: bash run.sh --device cuda:0 --limit 400
# To evaluate the whole list in full with a Slurm array instead, run this in this folder,
# after `dispersion enable`@AND@:
#   sbatch --array=1-@COUNT@ --gres=gpu:1 \\
#     --wrap 'lm_eval run --config "$(ls models/*.yaml | sed -n "${SLURM_ARRAY_TASK_ID}p")"'
set -eu
list="$(dirname "${BASH_SOURCE[0]}")"
@DOWNLOADS@exec dispersion race "$list" --batch_size auto --output_path "$list/race" "$@"
"""


def check_emit(folder: Path, domain: TokenSet, targets: Sequence[Target]) -> None:
    """Check, before anything is screened, that a short list can be written for lm-eval.

    Args:
        folder: The folder to write to.
        domain: The token set, which names lm-eval's tasks.
        targets: The checkpoints to screen.

    Raises:
        UsageError: ``folder`` is a file or not empty, no task is named, or lm-eval cannot load one
            of the checkpoints.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"expected a new or empty folder, got {folder}; name another folder", argument="emit"
        )
    if not domain.tasks:
        raise UsageError(
            f"expected tasks on which to evaluate the short list, got none, and the token set "
            f"{domain.name} names none; name them (NAME,NAME)",
            argument="tasks",
        )
    address = next((target.shown for target in targets if target.scheme is not None), None)
    if address is not None:
        raise UsageError(
            f"expected repositories and folders, got {address}, which lm-eval cannot load; copy it "
            "to a folder first",
            argument="emit",
        )


def emit(
    folder: Path,
    head: Mapping[str, Any],
    chosen: Shortlist,
    *,
    tasks: tuple[str, ...],
    command: str,
) -> Path:
    """Write a short list to a folder, for lm-eval; returns the path of its manifest.

    The folder gets ``models/001-NAME.yaml``, one configuration of ``lm_eval run --config`` for each
    checkpoint, with the commit that was screened; ``run.sh``, which downloads adapters and races
    the list; and finally ``manifest.json``.

    Args:
        folder: A new or empty folder.
        head: The screening's settings and failures, as `Result.head` returns them.
        chosen: The short list.
        tasks: Tasks of lm-eval.
        command: The command line of the screening, which the manifest records.

    Raises:
        DispersionError: A file cannot be written.
        ScreeningError: An adapter on the list has no usable base; see `on_base`.
    """
    members = chosen.chosen
    downloads = ""
    width = max(3, len(str(len(members))))
    files: dict[str, str] = {}
    for number, c in enumerate(members, start=1):
        name = f"{number:0{width}d}-{_file_name(c)}"
        target = _loaded(c)
        place = None
        if target.on and target.on_hub:
            place = f"{DOWNLOADED}/{c.name}"
            # A sub-folder holds a training's earlier steps.
            words = (c.repo, "--revision", str(c.revision), "--exclude", "*/*", "--local-dir")
            downloads += f'hf download {shlex.join(words)} "$list"/{shlex.quote(place)}\n'
        given = {
            "model": "hf",
            "model_args": target.arguments(c.revision, place),
            "tasks": list(tasks),
            "batch_size": "auto",
            "output_path": f"results/{name}",
        }
        files[f"models/{name}.yaml"] = yaml.safe_dump(given, sort_keys=False, allow_unicode=True)
    script = _RUN.replace("@COUNT@", str(len(members))).replace("@DOWNLOADS@", downloads)
    files["run.sh"] = script.replace("@AND@", " and the downloads below" if downloads else "")
    content = manifest_dict(head, chosen, tasks=tasks, command=command)
    files[FILE] = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        (folder / "models").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            # A path that is not UTF-8 becomes the escapes of JSON.
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
            if name.endswith(".sh"):
                (folder / name).chmod(0o755)
    except OSError as error:
        advice = "name another folder"
        if error.errno in FULL:
            advice = f"free some space or {advice}"
        raise DispersionError(
            f"could not write {folder}: {error.strerror or error}; {advice}"
        ) from error
    return folder / FILE


def _loaded(c: Screened) -> Target:
    """The checkpoint as lm-eval loads it."""
    target = replace(c.target, repo=c.repo, file=c.file if c.file.endswith(".gguf") else None)
    if not c.base:
        return target
    return replace(target, on=on_base(replace(target, revision=c.revision)).on)


def _file_name(c: Screened) -> str:
    repo = Path(c.repo).name if c.revision is None else c.repo
    parts = filter(None, (repo, c.target.revision, c.target.file))
    plain = re.sub(r"[^\w.-]+", "_", "-".join(parts))
    return plain[-100:].strip("._-") or "model"


def manifest_dict(
    head: Mapping[str, Any], chosen: Shortlist, *, tasks: tuple[str, ...], command: str
) -> dict[str, Any]:
    """Return the content of a manifest, as JSON values.

    Args:
        head: The screening's settings and failures, as `Result.head` returns them.
        chosen: The short list.
        tasks: Tasks of lm-eval.
        command: The command line of the screening.
    """
    candidates = []
    for choice in chosen.groups:
        with_equal_rows: set[str | None] = set()
        for c in choice.group.checkpoints:
            if c.equal_rows_with is not None:
                with_equal_rows |= {c.label, c.equal_rows_with}
        for c in choice.group.checkpoints:
            has_equal = c.copy_of is None and c.label in with_equal_rows
            candidates.append(_entry(c) | {"equal_rows": has_equal})
    failed = []
    for failure in head["failed"]:
        failed.append({name: failure[name] for name in ("repo", "revision", "error", "message")})
    return {
        "schema": SCHEMA,
        "version": __version__,
        "command": command,
        **{name: head[name] for name in _OF_SCREENING},
        "tasks": list(tasks),
        **chosen.to_dict(),
        "candidates": candidates,
        "failed": failed,
    }


_OF_SCREENING = ("domain", "task", "reference", "metric", "ranked_by", "base")


def _entry(c: Screened) -> dict[str, Any]:
    """A candidate of the manifest."""
    return {
        # Results may be read from another folder.
        "repo": c.target.place if c.target.local else c.repo,
        "requested_revision": c.target.revision,
        "revision": c.revision,
        "file": c.target.file,
        "tokenizer": c.target.arguments().get("tokenizer"),
        "family": c.family,
        "scale": c.scale,
        "rank": c.rank,
        "chosen": c.chosen,
        "inclusion_probability": c.inclusion_probability,
        "G": c.gap.mean,
        "ratio": None if c.ratio is None else c.ratio.mean,
    }


# --- read again -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """One checkpoint in a manifest.

    Attributes:
        target: The checkpoint, to which results are matched by name; its ``accuracy`` is the result
            that was found.
        revision: The commit that was screened; None for a folder or another storage.
        group: Family and scale.
        chosen: Why the checkpoint is to be evaluated: ``rank`` if it is on the short list, ``audit``
            if it was drawn at random; None if it is not to be evaluated.
        rank: Rank in the group.
        G: Gap G of the checkpoint.
        ratio: Ratio of the checkpoint; None if unknown.
        equal_rows: Whether another checkpoint of the group has the same rows without being a copy.
    """

    target: Target
    revision: str | None
    group: tuple[str, str]
    chosen: str | None
    rank: int
    G: float
    ratio: float | None = None
    equal_rows: bool = False

    @property
    def accuracy(self) -> float:
        """The candidate's accuracy, as a share or in per cent; NaN if it has no result."""
        return math.nan if self.target.accuracy is None else self.target.accuracy


@dataclass(frozen=True)
class Manifest:
    """A screening and its short list, read from a file.

    Attributes:
        domain: Name of the domain's token set.
        k: Largest number of ranks, from the first, that the list takes in a group.
        audit_sample: Number of checkpoints not on the list that were to be drawn at random in each
            group.
        candidates: All checkpoints that may be chosen, best first in each group. The base, and
            checkpoints without the figure that ranks their group, are not among them.
        place: Path of the file.
        task: Task of the screening; empty if the file names none.
        ranked_by: The figure that ranked, ``gap`` or ``ratio``; empty if unknown.
        base: Name of the base model; empty without one.
        kinds: (family, scale) -> kind in `evidence.SLOPES`, for groups whose chances are known.
        tasks: Tasks of lm-eval on which the list is evaluated; empty if unknown.
        metric: Distance of G; empty if unknown.
    """

    domain: str
    k: int
    audit_sample: int
    candidates: tuple[Candidate, ...]
    place: str
    task: str = ""
    ranked_by: str = ""
    base: str = ""
    kinds: Mapping[tuple[str, str], str] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    metric: str = ""


class _OldCandidateFile(TypedDict):
    """The layout of a candidate in 0.2, which wrote ``tied``."""

    repo: Place
    requested_revision: Place | None
    revision: Place | None
    file: PlainName | None
    family: Text
    scale: Text
    rank: Annotated[int, 1]
    chosen: Literal["rank", "audit", "tied"] | None
    G: float
    ratio: float | None


class _CandidateFile(_OldCandidateFile, total=False):
    """The layout of a candidate, with the newer keys."""

    equal_rows: bool
    tokenizer: Place | None


class _GroupFile(TypedDict, total=False):
    """The layout of a group; ``kind`` is newer."""

    family: Text
    scale: Text
    kind: Text | None


class _ManifestFile(TypedDict):
    domain: Text
    k: Annotated[int, 0]
    audit_sample: Annotated[int, 0]
    candidates: Sequence[_CandidateFile]


class _File(_ManifestFile, total=False):
    """The layout of a manifest, with newer keys."""

    task: Text | None
    ranked_by: Text | None
    metric: Text | None
    base: Text | None
    groups: Sequence[_GroupFile]
    tasks: Sequence[PlainName]


def read_shortlist_manifest(path: Path) -> Manifest:
    """Read the manifest of a short list.

    Args:
        path: The file, or the folder that ``--emit`` wrote.

    Raises:
        UsageError: The file cannot be read, is not such a manifest, or is damaged.
    """
    file = path / FILE if path.is_dir() else path
    hint = "`screen-checkpoints … --shortlist K --emit FOLDER` writes one"
    what = "the manifest of a short list"
    content = read_json(file, dict[str, Any], what, SCHEMA, hint, repair=_REPAIR)
    return shortlist_manifest(content, str(file))


def shortlist_manifest(content: Mapping[str, Any], place: str) -> Manifest:
    """Build a `Manifest` from its JSON content.

    Args:
        content: The content of the file.
        place: Name of the file, for errors.

    Raises:
        UsageError: The content is damaged, or has no candidates.
    """
    given = checked(_File, content, place, _REPAIR)
    candidates = [_candidate(entry) for entry in given["candidates"]]
    if not candidates:
        raise UsageError(
            f"{place}: expected at least one candidate, got none; screen some checkpoints, and write "
            "the list again"
        )
    targets = labelled([c.target for c in candidates])
    pairs = zip(candidates, targets, strict=True)
    kinds = {}
    for group in given.get("groups", ()):
        kind = group.get("kind")
        if kind:
            kinds[group.get("family", ""), group.get("scale", "")] = kind
    return Manifest(
        domain=given["domain"],
        k=given["k"],
        audit_sample=given["audit_sample"],
        candidates=tuple(replace(c, target=target) for c, target in pairs),
        place=place,
        task=given.get("task") or "",
        ranked_by=given.get("ranked_by") or "",
        base=given.get("base") or "",
        kinds=kinds,
        tasks=tuple(given.get("tasks", ())),
        metric=given.get("metric") or "",
    )


def _candidate(entry: _CandidateFile) -> Candidate:
    revision = entry["revision"]
    chosen = "rank" if entry["chosen"] == "tied" else entry["chosen"]
    return Candidate(
        Target(
            entry["repo"],
            entry["requested_revision"],
            local=revision is None,
            file=entry["file"],
            tokenizer=entry.get("tokenizer"),
        ),
        revision,
        (entry["family"], entry["scale"]),
        chosen,
        entry["rank"],
        entry["G"],
        entry["ratio"],
        bool(entry.get("equal_rows")),
    )
