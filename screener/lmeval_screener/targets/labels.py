"""Labels: the shortest distinct names of a report's checkpoints."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lmeval_dispersion.errors import printable
from lmeval_screener.targets.names import Target


def labelled(targets: Sequence[Target]) -> list[Target]:
    """The targets, each with a label that no other target of the report has.

    The label of a Hub repository is its name; that of any other target is the last parts of its path, as many
    as make it unique, and at least two for a GGUF file or a version of a registered model.

    >>> [t.label for t in labelled([Target("gg", local=True, file="a.gguf"), Target("models:/sums/2")])]
    ['gg/a.gguf', 'sums/2']
    """
    from lmeval_dispersion.report.cells import short_names

    paths = {target: _path(target) for target in targets if not target.on_hub}
    short = dict(zip(paths, short_names(list(paths.values())), strict=True))
    labels = []
    for target in targets:
        text = short.get(target, target.name)
        if target in paths and "/" not in text and (target.scheme == "models" or text.endswith(".gguf")):
            text = "/".join(paths[target].rsplit("/", 2)[-2:])
        labels.append(text)
    seen = Counter[str]()
    for place, text in enumerate(labels):
        seen[text] += 1
        if seen[text] > 1:
            labels[place] = f"{text} ({seen[text]})"
    return [replace(target, labelled=text) for target, text in zip(targets, labels, strict=True)]


def shared_name(targets: Sequence[Target]) -> str:
    """The name of the folder or organisation that holds all targets; empty if there is none.

    >>> shared_name([Target("runs/a", local=True), Target("runs/b", local=True)])
    'runs'
    """
    paths = [target.repo if target.on_hub else _path(target) for target in targets]
    if len({(target.scheme, target.local) for target in targets}) > 1:
        return ""
    return os.path.basename(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].rsplit("/", 1)[-1]


def _path(target: Target) -> str:
    if target.local:
        path = printable(os.path.abspath(target.repo).replace(os.sep, "/"))  # so that `.` has a name
    else:
        path = target.shown.partition(":/")[2].strip("/")
    if target.file is None:
        return path
    return f"{path}/{target.file}" if target.file.endswith(".gguf") else f"{path}:{target.file}"
