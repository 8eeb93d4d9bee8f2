"""The folder for lm-eval: pinned configurations, scripts, and the manifest of a short list."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_screener.screened import Screened
from lmeval_screener.shortlist.choice import Shortlist
from lmeval_screener.shortlist.manifest import FILE, manifest_dict
from lmeval_screener.targets import Target

#: lm-eval's tasks for each bundled domain.
TASKS = {
    "math": ("gsm8k_dispersion",),
    "code": ("humaneval_dispersion",),
    "legal": ("mmlu_professional_law_dispersion",),
}
_RUN = """\
#!/usr/bin/env bash
# Evaluates the short list of @MANIFEST@ with lm-eval, one checkpoint after the other.
# Arguments go to lm-eval: bash run.sh --device cuda:0 --limit 100
# SHARD=2 SHARDS=8 bash run.sh takes every eighth checkpoint from the third on. LM_EVAL names another lm_eval.
# Checkpoints with results are not evaluated again. Exit status: 0 all evaluated, 1 some failed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
read -r -a lm_eval <<<"${LM_EVAL:-lm_eval}"
if ! command -v "${lm_eval[0]}" > /dev/null; then
  echo "lm-eval (${lm_eval[0]}) is not installed; run: pip install 'lmeval-dispersion[models]'" >&2
  exit 1
fi
tasks=()
if ! dispersion enable --status 2>/dev/null | grep -q "^enabled"; then
  folder=$(dispersion enable --path) && tasks=(--include_path "$folder")
fi
shard=${SHARD:-0} shards=${SHARDS:-1} number=0 failed=()
for config in models/*.yaml; do
  turn=$((number % shards))
  number=$((number + 1))
  [ "$turn" -eq "$shard" ] || continue
  name=$(basename "$config" .yaml)
  if [ -n "$(find "results/$name" -name 'results_*.json' 2>/dev/null | head -n 1)" ]; then
    echo "$name: has results" >&2
    continue
  fi
  echo "$name: evaluating" >&2
  "${lm_eval[@]}" run --config "$config" ${tasks[@]+"${tasks[@]}"} "$@" || failed+=("$name")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "not evaluated: ${failed[*]}; run the same command again" >&2
  exit 1
fi
echo "next: dispersion verify @MANIFEST@ results" >&2
"""
_SLURM = """\
#!/usr/bin/env bash
# One job a checkpoint, each with one GPU. Submit it from this folder, with your cluster's own options:
#   sbatch --partition=NAME --time=2:00:00 slurm.sh --batch_size 16
#SBATCH --job-name=shortlist
#SBATCH --array=0-@LAST@
#SBATCH --gres=gpu:1
#SBATCH --output=slurm-%A_%a.log
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
SHARD=$SLURM_ARRAY_TASK_ID SHARDS=@COUNT@ exec bash run.sh "$@"
"""

_RAY = """\
#!/usr/bin/env python3
# One task a checkpoint, each with one GPU, on the Ray cluster of RAY_ADDRESS; every node sees this folder.
# Without RAY_ADDRESS on a cluster of this machine alone, which ends with the script.
#   python ray_shards.py --batch_size 16         GPUS=0 python ray_shards.py: without a GPU
# Checkpoints with results are not evaluated again. Exit status: 0 all evaluated, 1 some failed.
import os
import subprocess
import sys
from pathlib import Path

import ray

FOLDER, COUNT = Path(__file__).resolve().parent, @COUNT@


@ray.remote(num_gpus=float(os.environ.get("GPUS", "1")), max_retries=1)
def shard(number, arguments):
    settings = {**os.environ, "SHARD": str(number), "SHARDS": str(COUNT)}
    return subprocess.run(["bash", str(FOLDER / "run.sh"), *arguments], env=settings).returncode


# "local": without an address Ray would join the cluster started last on this machine.
address = os.environ.get("RAY_ADDRESS")
ray.init(address=address) if address else ray.init("local", include_dashboard=False)
failed = []
for number, task in enumerate([shard.remote(number, sys.argv[1:]) for number in range(COUNT)]):
    try:
        failed += [number] if ray.get(task) else []
    except ray.exceptions.RayError as error:
        print(f"shard {number}: {error}", file=sys.stderr)
        failed.append(number)
if failed:
    sys.exit(f"not evaluated: shards {failed}; run the same command again")
"""


def check_emit(folder: Path, tasks: str | None, domain: str, targets: Sequence[Target]) -> tuple[str, ...]:
    """Check, before anything is screened, that a short list can be written for lm-eval; its tasks."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"expected --emit to name a new or empty folder, got {folder}, which is neither; name another"
        )
    chosen = (
        TASKS.get(domain.partition(":")[0], ())
        if tasks is None
        else tuple(t.strip() for t in tasks.split(",") if t.strip())
    )
    if not chosen:
        known = ", ".join(f"{name} {', '.join(names)}" for name, names in TASKS.items())
        raise UsageError(
            f"expected --tasks NAME,NAME with --emit for the domain {domain}, got none; "
            f"tasks are known for {known}"
        )
    far = [target.repo for target in targets if "://" in target.repo]
    if far:
        raise UsageError(
            f"expected repositories and folders with --emit, got {far[0]}"
            f"{f' and {len(far) - 1} more' if len(far) > 1 else ''}, which lm-eval cannot read; copy them to "
            "a folder first, or leave --emit out"
        )
    return chosen


def emit(
    folder: Path, head: Mapping[str, Any], chosen: Shortlist, *, tasks: tuple[str, ...], command: str
) -> Path:
    """Write the folder; returns the manifest's path.

    ``models/001-NAME.yaml`` are lm-eval's configurations (``lm_eval run --config``), each pinned to the
    commit that was screened; ``run.sh`` runs them, ``slurm.sh`` as an array, ``ray_shards.py`` as tasks of a
    Ray cluster; ``manifest.json`` comes last.
    """
    members = chosen.chosen
    width = max(3, len(str(len(members))))
    manifest = json.dumps(
        manifest_dict(head, chosen, tasks=tasks, command=command),
        indent=1,
        ensure_ascii=False,
        allow_nan=False,
    )
    try:
        (folder / "models").mkdir(parents=True, exist_ok=True)
        for number, c in enumerate(members, start=1):
            name = f"{number:0{width}d}-{_plain(c)}"
            text = yaml.safe_dump(_config(c, tasks, f"results/{name}"), sort_keys=False, allow_unicode=True)
            (folder / "models" / f"{name}.yaml").write_text(
                f"# {_reason(c, chosen)}\n{text}", encoding="utf-8"
            )
        (folder / "run.sh").write_text(_RUN.replace("@MANIFEST@", FILE), encoding="utf-8")
        slurm = _SLURM.replace("@LAST@", str(max(len(members) - 1, 0))).replace("@COUNT@", str(len(members)))
        (folder / "slurm.sh").write_text(slurm, encoding="utf-8")
        ray = _RAY.replace("@COUNT@", str(len(members)))
        (folder / "ray_shards.py").write_text(ray, encoding="utf-8")
        for script in ("run.sh", "slurm.sh"):
            (folder / script).chmod(0o755)
        (folder / FILE).write_text(manifest + "\n", encoding="utf-8")
    except OSError as error:
        raise DispersionError(
            f"could not write {folder}: {error.strerror or error}; free some space or name another --emit"
        ) from error
    return folder / FILE


def _config(c: Screened, tasks: Sequence[str], output: str) -> dict[str, Any]:
    """lm-eval's configuration of one checkpoint."""
    local = c.revision is None
    arguments: dict[str, Any] = {"pretrained": str(Path(c.repo).resolve()) if local else c.repo}
    if not local:
        arguments["revision"] = c.revision
    if c.tensor.file.endswith(".gguf"):
        arguments["gguf_file"] = c.tensor.file
    return {
        "model": "hf",
        "model_args": arguments,
        "tasks": list(tasks),
        "batch_size": "auto",
        "output_path": output,
    }


def _reason(c: Screened, chosen: Shortlist) -> str:
    why = {"rank": "among the best", "tied": "tied with the last of the best", "audit": "drawn at random"}
    # One line whatever a folder is called: it stands as a comment.
    name = " ".join(c.label.split())
    return f"{name}: rank {c.rank} of {c.family}, {c.scale}; {why[chosen.why(c) or 'rank']}"


def _plain(c: Screened) -> str:
    """A checkpoint's name as that of a file."""
    parts = [Path(c.repo).name if c.revision is None else c.repo, c.requested_revision, c.file]
    return re.sub(r"[^\w.-]+", "_", "-".join(part for part in parts if part))[-100:].strip("._-") or "model"
