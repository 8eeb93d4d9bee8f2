"""The content of lm-eval's results, as far as readers use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.layouts import Text, checked
from lmeval_dispersion.logs.files import json_object, whole_text
from lmeval_dispersion.model_args import arguments_in

Results = dict[str, Any]


class _Config(TypedDict, total=False):
    """The part of a task's configuration that is read."""

    filter_list: Sequence[Any] | None


_Layout = TypedDict(
    "_Layout",
    {
        "results": dict[str, dict[str, Any]] | None,
        "configs": dict[str, _Config] | None,
        "group_subtasks": dict[str, Sequence[Text]] | None,
        "n-samples": dict[str, dict[str, Any]] | None,
        "versions": dict[str, Any] | None,
        "n-shot": dict[str, Any] | None,
        "config": dict[str, Any] | None,
        "task_hashes": dict[str, Any] | None,
    },
    total=False,
)


def read_results(file: Path) -> Results:
    """Return the content of a results file of lm-eval.

    Raises:
        HarnessError: The file cannot be read, or does not hold results of lm-eval.
    """
    content = json_object(whole_text(file), str(file))
    if not isinstance(content.get("results"), dict):
        raise HarnessError(
            f"{file} has no `results`; name a file results_DATE.json that lm-eval wrote"
        )
    checked(_Layout, content, file, "copy the file again, or run lm-eval again", HarnessError)
    return content


def section(results: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the JSON object under a key of lm-eval's results.

    The result is empty if the key is missing, or its value is not an object.
    """
    part = results.get(key)
    return part if isinstance(part, dict) else {}


def config_of(results: Mapping[str, Any], task: str) -> Mapping[str, Any]:
    """Return lm-eval's configuration of a task; empty if the results have none."""
    return section(section(results, "configs"), task)


def filter_names(results: Mapping[str, Any], task: str) -> list[str]:
    """Return the names of a task's filters, in lm-eval's order; empty if no filter is named."""
    names = []
    for entry in config_of(results, task).get("filter_list") or ():
        if isinstance(entry, dict) and "name" in entry:
            names.append(str(entry["name"]))
    if names:
        return names
    keys = [key.partition(",")[2] for key in section(section(results, "results"), task)]
    return list(dict.fromkeys(filter(None, keys)))


def model_arguments(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``model_args`` of an evaluation, as a mapping; empty if they are not recorded."""
    return arguments_in(section(results, "config").get("model_args"))


def model_of(results: Mapping[str, Any]) -> str:
    """Return the name of the evaluated model; empty if the results have none."""
    arguments = model_arguments(results)
    for name in (results.get("model_name"), arguments.get("pretrained"), arguments.get("model")):
        if name:
            return str(name)
    return ""
