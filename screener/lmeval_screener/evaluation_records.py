"""Results in the formats of others, in the shape of lm-eval's: Every Eval Ever and ``.eval_results``.

Sources: the schema of github.com/evaleval/every_eval_ever (0.2), and huggingface_hub's parser of the files
that repositories publish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import UsageError

#: Folder of a repository with its published results.
PUBLISHED = ".eval_results"
_CACHED = re.compile(r"models--(.+)")
# As lm-eval's converter describes a score: its metric, and the filter where there is one.
_DESCRIBED = re.compile(r"([\w@]+)(?: \(filter: ([^)]+)\))?")


def is_record(content: object) -> bool:
    """Whether JSON is a record of Every Eval Ever."""
    return isinstance(content, dict) and "evaluation_results" in content and "model_info" in content


def run_of_record(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """A record of Every Eval Ever in the shape of lm-eval's results.

    Scores for which lower is better are left out. A score without a known metric counts as ``acc`` where it
    is the only one of its evaluation.

    Raises:
        UsageError: A part that the schema requires is missing or of another type.
    """
    try:
        model = content["model_info"]
        details = model.get("additional_details") or {}
        results: dict[str, dict[str, float]] = {}
        for entry in content["evaluation_results"]:
            if entry["metric_config"]["lower_is_better"]:
                continue
            task, _, after = str(entry["evaluation_name"]).partition("/")
            described = _DESCRIBED.fullmatch(str(entry["metric_config"].get("evaluation_description") or ""))
            metric, name = (described[1], described[2] or "none") if described else ("", "none")
            if after and after != name:
                task, metric = str(entry["evaluation_name"]), metric or ""
            scores = results.setdefault(task, {})
            scores[f"{metric},{name}"] = float(entry["score_details"]["score"])
        for task, scores in results.items():
            if len(scores) == 1:
                results[task] = {"acc,none": next(iter(scores.values()))} if _unknown(scores) else scores
        arguments = {"pretrained": str(model["id"])}
        if revision := details.get("sha") or details.get("revision"):
            arguments["revision"] = str(revision)
        stamp = content.get("evaluation_timestamp") or content.get("retrieved_timestamp") or ""
        date = float(stamp) if re.fullmatch(r"\d+(\.\d+)?", str(stamp)) else 0.0
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{file}: expected a record of Every Eval Ever, and {type(error).__name__} {error} says that a "
            "part is missing or of another type; supply the numbers as a CSV file"
        ) from error
    return {"results": results, "config": {"model_args": arguments}, "date": date}


def _unknown(scores: Mapping[str, float]) -> bool:
    return all(key.startswith(",") for key in scores)


def published_parser(place: str) -> Any:
    """The parser of huggingface_hub, which knows published results since 1.4.

    Raises:
        UsageError: huggingface_hub is older.
    """
    try:
        from huggingface_hub import parse_eval_result_entries
    except ImportError as error:
        raise UsageError(
            f"{place}: expected huggingface_hub 1.4 or newer, which reads {PUBLISHED}, got {_hub_version()}; "
            "run: pip install -U huggingface_hub, or supply a CSV file"
        ) from error
    return parse_eval_result_entries


def _hub_version() -> str:
    import huggingface_hub

    return huggingface_hub.__version__


def published_entries(file: Path) -> list[Any]:
    """The entries of one ``.eval_results/*.yaml``, as huggingface_hub parses them.

    Raises:
        UsageError: It cannot be read as one, or huggingface_hub is older than these files.
    """
    import yaml

    parse_eval_result_entries = published_parser(str(file))
    try:
        return list(parse_eval_result_entries(yaml.safe_load(file.read_text(encoding="utf-8"))))
    except OSError as error:
        raise UsageError(f"{file}: expected results to read, got {error.strerror or error}") from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{file}: expected a list of results as {PUBLISHED} has them (dataset.id, dataset.task_id, "
            f"value), got {type(error).__name__}: {reason}"
        ) from error


def published_model(file: Path) -> tuple[str, str | None]:
    """The model whose ``.eval_results`` a file lies in, and its commit where the path tells it.

    >>> published_model(Path("/hub/models--org--m/snapshots/1f2e/.eval_results/gsm8k.yaml"))
    ('org/m', '1f2e')
    >>> published_model(Path("/models/org/m/.eval_results/gsm8k.yaml"))
    ('/models/org/m', None)
    """
    folder = file.parent.parent if file.parent.name == PUBLISHED else file.parent
    cached = _CACHED.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    if cached:
        return cached[1].replace("--", "/"), folder.name
    return str(folder), None
