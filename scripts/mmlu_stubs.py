"""Write task_configs/mmlu/: a stub for each of lm-eval's 57 MMLU subjects, and the groups.

Run it after an upgrade of lm-eval and look at the difference: `python scripts/mmlu_stubs.py`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import yaml

OURS = Path(__file__).resolve().parent.parent / "task_configs" / "mmlu"
CLASS = "class: !function lmeval_dispersion.harness.DispersionTask\n"
AGGREGATE = """aggregate_metric_list:
  - metric: acc
    weight_by_size: true
  - metric: dispersion
  - metric: dispersion_correct
  - metric: dispersion_incorrect
metadata:
  version: {version}
"""


def main() -> None:
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.origin is not None
    theirs = Path(spec.origin).parent / "tasks" / "mmlu" / "default"
    OURS.mkdir(parents=True, exist_ok=True)
    for old in OURS.glob("*.yaml"):
        old.unlink()
    for path in sorted(theirs.glob("mmlu_*.yaml")):
        config = yaml.safe_load(path.read_text())
        (OURS / f"{config['task']}_dispersion.yaml").write_text(
            f"include: ../../mmlu/default/{path.name}\n"
            f"task: {config['task']}_dispersion\n"
            f"tag: {config['tag'].replace('mmlu_', 'mmlu_dispersion_', 1)}\n{CLASS}"
        )
    for path in sorted(theirs.glob("_mmlu*.yaml")):
        config = yaml.safe_load(path.read_text())
        alias = f"group_alias: {config['group_alias']}\n" if "group_alias" in config else ""
        members = [
            m.replace("mmlu_", "mmlu_dispersion_", 1) if m.endswith("_tasks") else f"{m}_dispersion"
            for m in config["task"]
        ]
        (OURS / f"{path.stem}_dispersion.yaml").write_text(
            f"group: {config['group']}_dispersion\n{alias}task:\n"
            + "".join(f"  - {member}\n" for member in members)
            + AGGREGATE.format(version=config["metadata"]["version"])
        )


if __name__ == "__main__":
    main()
