"""What a race will load and ask: a budget's phases, the fewest and most questions, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmeval_dispersion.asking import LmEval
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.racing.contest import LONG, Phase, phases
from lmeval_dispersion.racing.lineup import Entry, Lineup, base_of
from lmeval_dispersion.racing.rule import SHARED, STEP
from lmeval_dispersion.report.declared import count as counted
from lmeval_dispersion.report.declared import listed


def questions_of(budget: int | str, everything: int) -> int:
    """A budget, as a number or as ``N%`` of the number of questions of all together.

    Raises:
        UsageError: It is neither, negative, or a part that is not above 0 and at most 100 %.
    """
    text = str(budget).strip()
    try:
        if text.endswith("%"):
            share = float(text[:-1])
            if not 0 < share <= 100:
                raise ValueError
            return max(1, int(everything * share / 100))
        number = int(text)
        if number < 1:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"expected a number of questions, or a part such as 10%, got {text}", argument="budget"
        ) from None
    return number


def batch_of(asking: LmEval, requests: int) -> int:
    """Number of questions asked at once, where each has so many ``requests``.

    It is the step of a bet, or what fills a batch of the device, if that is more; with ``auto`` as
    many as its batches are made for.
    """
    size = str(asking.batch_size or 1)
    if size.startswith("auto"):
        return max(SHARED, STEP)
    return max(STEP, math.ceil(int(size) / max(1, requests)))


def may_cut(entries: Sequence[Entry]) -> bool:
    """Whether a list is so long that its first third by the shared questions may go on alone."""
    why = [entry.chosen for entry in entries if entry.chosen not in (None, "base")]
    return len(why) >= LONG and "named" not in why and "audit" not in why


@dataclass(frozen=True)
class Plan:
    """The checkpoints that race and the questions that each may be asked.

    Attributes:
        entries: Those that race, the base included.
        questions: Most questions of each.
        phases: Those of a budget; none for a race to its end.
        by: What orders them: rows, or a block of questions that all share.
        resident: Whether all stay loaded, as adapters of one base and a server's models do.
    """

    entries: Sequence[Entry]
    questions: int
    phases: Sequence[Phase] = ()
    by: str = "rows"
    resident: bool = False

    @classmethod
    def of(
        cls,
        lineup: Lineup,
        entries: Sequence[Entry],
        questions: int,
        *,
        budget: int | None,
        api: bool,
        top: int = 1,
    ) -> Plan:
        """The plan of a list, for a ``budget`` of shared questions or to its end.

        Raises:
            UsageError: The budget has no question for each.
        """
        others = [entry for entry in entries if entry.chosen != "base"]
        resident = api or (bool(lineup.reference) and all(base_of(e.arguments) for e in others))
        planned = list[Phase]()
        if budget is not None:
            has_base = len(others) < len(entries)
            planned = phases(
                len(others), questions, budget, top=top, kept=resident, reference=has_base
            )
            if not planned:
                raise UsageError(
                    f"expected at least {len(entries)}, a question of each checkpoint, got "
                    f"{budget}",
                    argument="budget",
                )
        return cls(entries, questions, planned, lineup.by, resident)

    @property
    def checkpoints(self) -> int:
        """Number of checkpoints, without the base."""
        return sum(entry.chosen != "base" for entry in self.entries)

    @property
    def expected(self) -> tuple[int, int]:
        """Fewest and most questions in all."""
        count = self.checkpoints
        bases = len(self.entries) - count
        if self.phases:
            total = bases * self.phases[0].questions
            before = 0
            for phase in self.phases:
                total += phase.checkpoints * (phase.questions - before)
                before = phase.questions
            return total, total
        first = min(SHARED if self.by == "block" else STEP, self.questions)
        fewest = (1 + bases) * self.questions + first * (count - 1)
        return fewest, (count + bases) * self.questions

    @property
    def loads(self) -> int:
        """Most times that weights are loaded."""
        if self.resident:
            return 1
        has_base = self.checkpoints < len(self.entries)
        if self.phases:
            return sum(phase.checkpoints for phase in self.phases) + has_base
        if self.by != "block":
            return len(self.entries)
        # Adapters share their base; another one takes its place, and is loaded again at its turn.
        whole = [
            e
            for e in self.entries
            if not (has_base and (e.chosen == "base" or base_of(e.arguments)))
        ]
        return 2 * len(whole) * (1 + has_base) + has_base

    def words(self, size: str = "") -> str:
        """A dry run's sentence; ``size`` is that of the weights."""
        few, many = self.expected
        about = f" (about {size})" if size else ""
        if not self.phases:
            return (
                f"Nothing was loaded (dry run): {self.checkpoints}{about} would be, and asked "
                f"{few:,} to {many:,} questions."
            )
        steps = list[str]()
        for phase in self.phases:
            checkpoints = counted(phase.checkpoints, "checkpoint")
            steps.append(f"{checkpoints} up to {counted(phase.questions, 'shared question')}")
        return (
            f"Nothing was loaded (dry run): {self.checkpoints}{about} would be, with "
            f"{counted(self.loads, 'load')}, and asked {many:,} questions in "
            f"{counted(len(steps), 'phase')}: {listed(steps)}."
        )

    def forecast(self, load: float, ask: float) -> str:
        """Cost in words, by ``load`` seconds a load and ``ask`` seconds a question."""
        few, many = self.expected
        seconds = self.loads * load + many * ask
        time = f"{max(1, round(seconds / 60))} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
        shares = ""
        if self.checkpoints < len(self.entries):
            shares = f" for {counted(self.checkpoints, 'checkpoint')}, as adapters share their base"
        questions = f"{many:,}" if few == many else f"{few:,} to {many:,}"
        return f"{counted(self.loads, 'load')}{shares}, {questions} questions, at most about {time}"
