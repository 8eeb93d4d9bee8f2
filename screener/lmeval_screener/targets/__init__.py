"""The checkpoints that a user asks for: names, addresses, folders of training runs, families."""

from lmeval_screener.targets.labels import labelled, shared_name
from lmeval_screener.targets.names import Listed, Target, parse_name, parse_target, parse_targets
from lmeval_screener.targets.runs import run_and_step

__all__ = [
    "Listed",
    "Target",
    "labelled",
    "parse_name",
    "parse_target",
    "parse_targets",
    "run_and_step",
    "shared_name",
]
