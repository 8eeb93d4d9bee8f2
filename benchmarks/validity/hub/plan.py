"""Which checkpoints are there: repositories asked for their branches, steps chosen by the configuration."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

from benchmarks.validity.hub.configuration import ONE, Suite

#: Seconds that one wait for a new window of the Hub's quota may take, and waits for one repository.
LONGEST, WAITS = 310, 3
_LEFT = re.compile(r";\s*t\s*=\s*(?P<seconds>\d+)")


T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A branch that is screened; ``keys`` are those of recipe, size and seed in the configuration."""

    suite: str
    repository: str
    revision: str
    keys: Mapping[str, str]
    step: int

    @property
    def name(self) -> str:
        """As a user writes it."""
        return f"{self.repository}@{self.revision}"

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What published scores are matched by: recipe, size, seed, step."""
        return (self.part("recipe"), self.part("size"), self.part("seed"), self.step)

    def part(self, name: str) -> str:
        """A key, or the word for a suite that has one of it."""
        return self.keys.get(name, ONE)


@dataclass(frozen=True)
class Missing:
    """What could not be had: a stable word and a sentence, as the screener has them."""

    suite: str
    name: str
    error: str
    message: str


def branches_of(repository: str) -> list[str]:
    """Names of a repository's branches and tags."""
    refs = HfApi().list_repo_refs(repository)
    return [ref.name for ref in [*refs.branches, *refs.tags]]


def checkpoints_of(
    suite: Suite, *, limit: int | None = None, branches: Callable[[str], list[str]] = branches_of
) -> tuple[list[Checkpoint], list[Missing]]:
    """The suite's checkpoints, by repository, seed and step, and what is not there.

    Args:
        suite: From the configuration.
        limit: Only so many repositories, the first of the configuration.
        branches: Asks a repository.
    """
    found: list[Checkpoint] = []
    missing: list[Missing] = []
    for repository, keys in suite.repositories()[:limit]:
        try:
            names = patiently(partial(branches, repository))
        except Exception as error:  # huggingface_hub lets those of its HTTP library through
            missing.append(Missing(suite.name, repository, *said(repository, error)))
            continue
        own = list(_matching(suite, repository, keys, names))
        if not own:
            missing.append(
                Missing(
                    suite.name, repository, "RevisionNotFound",
                    f"expected branches such as {suite.revision.pattern}, got {len(names)} others "
                    f"({', '.join(names[:3]) or 'none'})",
                )
            )  # fmt: skip
        found += _chosen(suite, own)
    return found, missing


def patiently(ask: Callable[[], T]) -> T:
    """What a request to the Hub gives, repeated in the next window where the quota is used up."""
    for _ in range(WAITS - 1):
        try:
            return ask()
        except HfHubHTTPError as error:
            seconds = _wait(error)
            if seconds is None:
                raise
            print(f"validity-hub: the Hub's quota is used up; going on in {seconds} s", file=sys.stderr)
            time.sleep(seconds)
    return ask()


def _wait(error: HfHubHTTPError) -> int | None:
    """Seconds until a request may be repeated; None where waiting is of no use."""
    response = error.response
    if response is None or response.status_code != 429:
        return None
    told = _LEFT.search(response.headers.get("RateLimit", ""))
    seconds = response.headers.get("Retry-After") or (told["seconds"] if told else "")
    return int(seconds) if seconds.isdigit() and int(seconds) <= LONGEST else None


def said(repository: str, error: Exception) -> tuple[str, str]:
    """A stable word and a sentence for what the Hub refused."""
    response: Any = getattr(error, "response", None)
    code = response.status_code if response is not None else None
    if isinstance(error, GatedRepoError) or code == 403:
        return "GatedRepo", f"accept its terms on https://huggingface.co/{repository}, and set HF_TOKEN"
    if code in (401, 404):  # the Hub answers 401 for what is not there, to those without a token
        return "RepoNotFound", "there is no such repository, or HF_TOKEN does not open it"
    if code == 429:
        return "RateLimited", "the Hub's quota stays used up; the same command goes on from here later"
    return type(error).__name__, " ".join(str(error).split())[:200]


def _matching(
    suite: Suite, repository: str, keys: Mapping[str, str], names: Iterable[str]
) -> Iterable[Checkpoint]:
    for name in dict.fromkeys(names):
        if (match := suite.revision.fullmatch(name)) is None:
            continue
        groups = match.groupdict()
        if "seed" in groups and groups["seed"] not in suite.parts["seed"]:
            continue
        own = {**keys, **({"seed": groups["seed"]} if "seed" in groups else {})}
        yield Checkpoint(suite.name, repository, name, own, int(groups["step"]))


def _chosen(suite: Suite, own: list[Checkpoint]) -> list[Checkpoint]:
    last: dict[str, int] = {}
    for one in own:
        if one.step <= suite.most(one.part("size")):
            last[one.part("seed")] = max(last.get(one.part("seed"), 0), one.step)
    return sorted(
        (
            one
            for one in own
            if suite.step_wanted(one.part("size"), one.step)
            or (suite.steps.get("last") and one.step == last.get(one.part("seed")))
        ),
        key=lambda one: (
            list(suite.parts["seed"]).index(one.keys["seed"]) if "seed" in one.keys else 0,
            one.step,
        ),
    )
