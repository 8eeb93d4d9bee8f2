"""The study's configuration: suites of checkpoints, where their scores are published, what is compared."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

#: Keys of a template that need not be there: a suite of one recipe, or of one seed.
PARTS = ("recipe", "size", "seed")
ONE = "all"
SOURCES = {
    "parquet": {"kind", "dataset", "files", "columns"},
    "lm-eval": {"kind", "dataset", "git", "folder", "local", "path", "same"},
}


@dataclass(frozen=True)
class Skill:
    """What is published: tasks pooled by their questions.

    Attributes:
        tasks: Questions by task.
        metric: Of each task.
        chance: What guessing gives; None where the score is no accuracy.
    """

    tasks: Mapping[str, int]
    metric: str
    chance: float | None

    @property
    def questions(self) -> int:
        return sum(self.tasks.values())


@dataclass(frozen=True)
class Pair:
    """G of a domain and the skill that it is held against; a control is tabled and claims nothing."""

    domain: str
    skill: str
    control: bool

    @property
    def name(self) -> str:
        return f"G({self.domain}) and {self.skill}"


@dataclass(frozen=True)
class Suite:
    """Trajectories of one publisher.

    Attributes:
        name: Key in the configuration.
        about: A line on it.
        repository: Template of its repositories' names.
        revision: What a branch is called; groups ``step`` and, where branches have seeds, ``seed``.
        parts: Names by key of ``recipe``, ``size`` and ``seed``.
        steps: ``from``, ``every`` and ``most`` (a number, or numbers by size), ``last``.
        domains: Token sets of the screen.
        sources: Where scores are published.
        skills: What is taken of them.
        pairs: What is compared.
        small: Size whose G is held against the largest's skill; None: no such comparison.
        loss: A source's column that is the loss; None: none is published.
    """

    name: str
    about: str
    repository: str
    revision: re.Pattern[str]
    parts: Mapping[str, Mapping[str, str]]
    steps: Mapping[str, Any]
    domains: Sequence[str]
    sources: Sequence[Mapping[str, Any]]
    skills: Mapping[str, Skill]
    pairs: Sequence[Pair]
    small: str | None
    loss: str | None

    def repositories(self) -> list[tuple[str, dict[str, str]]]:
        """Names of repositories, each with the keys that made it."""
        named = {name for _, name, _, _ in string.Formatter().parse(self.repository) if name}
        found: list[dict[str, str]] = [{}]
        for part in PARTS:
            if part in named:
                found = [{**keys, part: key} for keys in found for key in self.parts[part]]
        return [(self.repository.format(**keys), keys) for keys in found]

    def step_wanted(self, size: str, step: int) -> bool:
        """Whether a step is one of those that are looked at in any case."""
        start, every = self._of_size("from", size, 0), self._of_size("every", size, 1)
        return step >= start and (step - start) % every == 0 and step <= self.most(size)

    def most(self, size: str) -> float:
        """The last step of a size that is looked at."""
        return float(self._of_size("most", size, float("inf")))

    def _of_size(self, key: str, size: str, otherwise: Any) -> Any:
        value = self.steps.get(key, otherwise)
        return value[size] if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class HubStudy:
    """The whole configuration."""

    path: Path
    content: Mapping[str, Any]
    suites: Mapping[str, Suite]

    @property
    def analysis(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.content["analysis"]
        return found


def read_study(path: Path) -> HubStudy:
    """A configuration file, checked.

    Raises:
        ValueError: A part that makes no sense, in a sentence that names it.
    """
    content = yaml.safe_load(path.read_text("utf-8"))
    for key in ("suites", "analysis", "claims", "reference"):
        if key not in content:
            raise ValueError(f"{path}: expected the key {key}, got {', '.join(content)}")
    suites = {name: _suite(path, name, entry) for name, entry in content["suites"].items()}
    return HubStudy(path, content, suites)


def _suite(path: Path, name: str, entry: Mapping[str, Any]) -> Suite:
    place = f"{path}: suite {name}"
    try:
        revision = re.compile(entry["revision"])
        skills = {
            key: Skill(one["tasks"], one["metric"], one.get("chance")) for key, one in entry["skills"].items()
        }
        pairs = [Pair(one["domain"], one["skill"], one.get("control", False)) for one in entry["pairs"]]
        parts = {part: entry.get(f"{part}s", {}) for part in PARTS}
        suite = Suite(
            name, entry["about"], entry["repository"], revision, parts, entry["steps"], entry["domains"],
            entry["scores"], skills, pairs, entry.get("small"), entry.get("loss"),
        )  # fmt: skip
    except (KeyError, TypeError, re.error) as error:
        raise ValueError(
            f"{place}: expected about, repository, revision, sizes, steps, domains, scores, skills and "
            f"pairs, got {type(error).__name__} {error}"
        ) from error
    if "step" not in revision.groupindex:
        raise ValueError(f"{place}: revision: expected a group `step`, got {entry['revision']!r}")
    for _, part, _, _ in string.Formatter().parse(suite.repository):
        if part is not None and not parts.get(part):
            raise ValueError(f"{place}: repository: expected names for {{{part}}} under {part}s, got none")
    for pair in pairs:
        if pair.domain not in suite.domains or pair.skill not in skills:
            raise ValueError(
                f"{place}: pairs: expected a domain of {', '.join(suite.domains)} and a skill of "
                f"{', '.join(skills)}, got {pair.name}"
            )
    for source in suite.sources:
        if set(source) - SOURCES.get(source.get("kind", ""), set()):
            raise ValueError(f"{place}: scores: expected the keys of one of {SOURCES}, got {dict(source)}")
    if suite.small is not None and suite.small not in parts["size"]:
        raise ValueError(f"{place}: small: expected one of {', '.join(parts['size'])}, got {suite.small!r}")
    return suite
