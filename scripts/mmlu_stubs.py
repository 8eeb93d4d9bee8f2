"""Write task_configs/mmlu/: the pattern for lm-eval's 57 MMLU subjects, and the groups.

Run it after an upgrade of lm-eval and look at the difference: `python scripts/mmlu_stubs.py`.
"""

from __future__ import annotations

from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import yaml

OURS = Path(__file__).resolve().parent.parent / "task_configs" / "mmlu"
PATTERN = """include: ../../mmlu/default/mmlu_NAME.yaml
task: mmlu_NAME_dispersion
tag: mmlu_dispersion_CATEGORY_tasks
class: !function lmeval_dispersion.harness.DispersionTask
"""
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
    subjects = defaultdict(list)
    for path in sorted(theirs.glob("mmlu_*.yaml")):
        config = yaml.safe_load(path.read_text())
        assert config["task"] == path.stem
        category = config["tag"].removeprefix("mmlu_").removesuffix("_tasks")
        subjects[category].append(path.stem.removeprefix("mmlu_"))
    lines = [
        f"# for NAME in {' '.join(names)}; CATEGORY = {c}\n"
        for c, names in sorted(subjects.items())
    ]
    (OURS / "mmlu_NAME_dispersion.yaml").write_text("".join(lines) + PATTERN)
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
