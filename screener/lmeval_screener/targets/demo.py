"""The bundled demo family: tiny models that were trained to different degrees on arithmetic."""

from __future__ import annotations

from lmeval_dispersion.paths import data_folder
from lmeval_screener.targets.target import Target


def demo_targets() -> list[Target]:
    """The demo's checkpoints, with the accuracy that was measured when they were trained."""
    import yaml

    folder = data_folder("demo")
    family = yaml.safe_load((folder / "family.yaml").read_text(encoding="utf-8"))
    return [
        Target(
            str(folder / entry["folder"]),
            family=family["name"],
            local=True,
            accuracy=float(entry["accuracy"]["mean"]),
            negative_control=entry["answers"] != "right",
        )
        for entry in family["checkpoints"]
    ]
