"""What ``dispersion train`` is asked to do: defaults, a YAML file, flags, in that order.

The schedules of the weight are those of every trainer.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import json
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.model.layer_names import states_after_blocks

BASE, NOISE, FORGET = "base", "noisy_embeddings", "active_forgetting"
# Written out, not taken from the table of losses: this module and `--help` do without torch.
ARMS = (
    BASE,
    "push_away",
    "cross_domain_push_away",
    "squeeze",
    "angular_spread",
    "orthogonalization",
    "l2_repel",
    "decorrelation",
    NOISE,
    FORGET,
)
Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear", "cosine")


def weight_factor(step: int, total: int, schedule: Schedule = "constant", warmup: int = 0) -> float:
    """Factor of the weight at a step, in [0, 1].

    Args:
        step: Number of the step, from 0.
        total: Number of steps of the run.
        schedule: ``constant``: 1. ``linear``: rises over ``warmup`` steps from 1/warmup to 1 and stays
            (warmup 0: over the whole run). ``cosine``: the same rise over ``warmup`` steps, then down to 0
            along half a cosine.
        warmup: Steps of the rise; ignored by ``constant``.

    Raises:
        UsageError: There is no such schedule.

    >>> [weight_factor(step, 4, "linear", 2) for step in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return min(1.0, (step + 1) / (warmup or total))
    if schedule == "cosine":
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))
    raise UsageError(f"expected a schedule of {', '.join(SCHEDULES)}, got {schedule!r}")


@dataclass(frozen=True)
class Settings:
    """One comparison: every arm with every seed. Field names are the flags' with underscores.

    Attributes:
        model: Hub id or folder of the base model.
        data: Texts to train on: a file or a Hub data set id.
        out: Folder of the arms; the same command goes on in it after an interruption.
        second_data: Texts of a second domain; the blocks of both are mixed one to one.
        eval_data: Held-out texts; without them the last ``eval_tokens`` tokens of ``data``.
        second_eval_data: The same for the second domain.
        from_scratch: Start from random weights (the same for all arms of a seed).
        arms: What to compare, names of :data:`ARMS`.
        seeds: Each arm is trained once with each.
        tokens: Tokens that each arm sees.
        block: Tokens of a sequence.
        batch: Sequences of a micro-batch.
        accumulate: Micro-batches of an optimizer step.
        lr: Peak learning rate; linear warm-up over 5 % of the steps, then linear decay to 0.
        weight: Weight of the loss.
        layers: As in :class:`~lmeval_dispersion.training.regularizer.DispersionRegularizer`, separated by
            commas.
        max_tokens: Tokens drawn of a sequence for the loss; 0 takes all.
        schedule: Schedule of the weight.
        noise_alpha: NEFTune's alpha, of the arm ``noisy_embeddings``.
        forget_every: Steps between resets of the input embeddings, of the arm ``active_forgetting``.
        eval_tokens: Tokens of each domain to evaluate on.
        evals: Evaluations while an arm trains, besides those before and after.
        save_every: Steps between checkpoints.
        bf16: Train under bf16 autocast.
        lora: Train LoRA adapters instead of the weights, see :class:`Lora`; None trains the weights.
        report_to: Trackers of transformers' Trainer that get the log, separated by commas.
        column: Field of the text in JSONL, parquet and Hub data sets.
        data_config: Configuration of Hub data sets.
        split: Split of Hub data sets.
        processes: How many processes train an arm together, each ``batch`` sequences a micro-batch. No flag:
            the launcher (torchrun, accelerate) tells it.
    """

    model: str
    data: str
    out: str
    second_data: str | None = None
    eval_data: str | None = None
    second_eval_data: str | None = None
    from_scratch: bool = False
    arms: tuple[str, ...] = (BASE, "angular_spread")
    seeds: tuple[int, ...] = (0,)
    tokens: int = 200_000_000
    block: int = 512
    batch: int = 8
    accumulate: int = 1
    lr: float = 5e-5
    weight: float = 0.1
    layers: str = "last"
    max_tokens: int = 256
    schedule: str = "constant"
    noise_alpha: float = 5.0
    forget_every: int = 1000
    eval_tokens: int = 50_000
    evals: int = 4
    save_every: int = 200
    bf16: bool = False
    lora: str | None = None
    report_to: str = "none"
    column: str = "text"
    data_config: str | None = None
    split: str = "train"
    processes: int = 1

    @property
    def steps(self) -> int:
        """Optimizer steps of an arm."""
        return self.tokens // self.step_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step, over all processes."""
        return self.block * self.batch * self.accumulate * self.processes

    @property
    def trackers(self) -> list[str]:
        """Names in ``report_to``; empty for ``none``."""
        names = [name.strip() for name in self.report_to.split(",")]
        return [name for name in names if name not in ("", "none")]

    @property
    def domains(self) -> list[tuple[str, str | None]]:
        """Training and evaluation source of each domain."""
        pairs = [(self.data, self.eval_data)]
        return [*pairs, (self.second_data, self.second_eval_data)] if self.second_data else pairs


@dataclass(frozen=True)
class Lora:
    """Adapters as ``--lora`` gives them: ``r=8,alpha=16,dropout=0.05,targets=q_proj+v_proj``.

    Attributes:
        r: Rank.
        alpha: Numerator of the scale alpha / r; by default 2 r.
        dropout: Of the adapters' input.
        targets: Names of the modules that get one; empty takes PEFT's choice for the architecture.
    """

    r: int
    alpha: int
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Lora:
        """Read the form above.

        Raises:
            UsageError: A part is unknown, no number or out of range, or the rank is missing.

        >>> Lora.of("r=8,targets=q_proj+v_proj")
        Lora(r=8, alpha=16, dropout=0.0, targets=('q_proj', 'v_proj'))
        """
        given = dict(part.strip().partition("=")[::2] for part in text.split(","))
        try:
            r = int(given.pop("r"))
            alpha = int(given.pop("alpha", 2 * r))
            dropout = float(given.pop("dropout", 0))
            targets = tuple(name for name in given.pop("targets", "").split("+") if name)
            if given or r < 1 or alpha < 1 or not 0 <= dropout < 1:
                raise ValueError
        except (KeyError, ValueError):
            raise UsageError(
                f"expected lora as r=8[,alpha=16][,dropout=0.05][,targets=q_proj+v_proj], got {text!r}"
            ) from None
        return cls(r, alpha, dropout, targets)


def settings_from(flags: dict[str, Any], file: str | None) -> Settings:
    """Settings from a YAML file and from flags, which win.

    Raises:
        UsageError: The file cannot be read, a name is unknown, or a value cannot be used.
    """
    given = {**(_read(file) if file else {}), **flags}
    known = {field.name: field for field in fields(Settings)}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UsageError(f"there is no setting {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    missing = [name for name in ("model", "data", "out") if not given.get(name)]
    if missing:
        raise UsageError(
            f"expected {', '.join('--' + name for name in missing)}; see `dispersion train --help`"
        )
    values = {name: _converted(name, value, known[name].default) for name, value in given.items()}
    settings = Settings(**values)
    _check(settings)
    return settings


def count(text: Any) -> int:
    """A number such as ``200M``, ``1.5k``, ``2e6`` or ``4096``.

    >>> count("200M")
    200000000
    """
    word = str(text).strip().replace("_", "")
    factor = {"k": 10**3, "m": 10**6, "b": 10**9}.get(word[-1:].lower(), 1)
    try:
        return int(float(word[:-1] if factor > 1 else word) * factor)
    except ValueError as error:
        raise UsageError(f"expected a number such as 200M, 50k or 4096, got {text!r}") from error


# What settings.json of earlier folders does not say.
_NEW = {"lora": None, "report_to": "none", "processes": 1}


def agree_or_write(settings: Settings) -> Path:
    """The folder of the arms, with the settings in it.

    Raises:
        UsageError: It holds arms with other settings, or files that are none of ours, or cannot be written.
    """
    folder = Path(settings.out).expanduser()
    try:
        return _agreed(settings, folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(
            f"expected --out where folders and files can be made, got {folder}: {error.strerror or error}"
        ) from error


def _agreed(settings: Settings, folder: Path) -> Path:
    path = folder / "settings.json"
    ours = json.dumps(dataclasses.asdict(settings) | {"out": ""}, indent=1)
    if path.is_file() and not any(left.is_file() for left in folder.glob("*-seed*/**/*")):
        # A start that failed before anything was trained must not block the next one.
        if path.read_text() != ours + "\n":
            for blocks in folder.glob("blocks-*.npz"):
                blocks.unlink()
            path.write_text(ours + "\n")
        return folder
    if path.is_file():
        before = {**_NEW, **json.loads(path.read_text())}
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        now = json.loads(ours)
        other = [f"{k} {before.get(k)!r} -> {now[k]!r}" for k in now if before.get(k) != now[k]]
        if other:
            raise UsageError(
                f"{folder} holds arms with other settings ({'; '.join(other)}); choose another --out"
            )
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"expected a new or empty folder, got {folder}; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(ours + "\n")
    return folder


def _read(file: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the settings file {file} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"expected YAML in {file}: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict):
        raise UsageError(f"expected names and values in {file}, got {type(found).__name__}")
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def _converted(name: str, value: Any, default: Any) -> Any:
    try:
        if name in ("arms", "seeds"):
            parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
            return tuple(str(p).strip() if name == "arms" else int(p) for p in parts)
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise UsageError(f"expected true or false for {name}, got {value!r}")
            return value
        if isinstance(default, int):
            return count(value)
        return float(value) if isinstance(default, float) else value if value is None else str(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"expected a number for {name}, got {value!r}") from error


def _check(s: Settings) -> None:
    for arm in s.arms:
        if arm not in ARMS:
            near = difflib.get_close_matches(arm, ARMS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"expected arms of {', '.join(ARMS)}, got {arm!r}{hint}")
    if s.schedule not in SCHEDULES:
        raise UsageError(f"expected a schedule of {', '.join(SCHEDULES)}, got {s.schedule!r}")
    states_after_blocks(s.layers)
    least = {"block": 2, "batch": 1, "accumulate": 1, "save_every": 1, "forget_every": 1, "evals": 0}
    least |= {"eval_tokens": 1, "max_tokens": 0}
    for name, low in least.items():
        if getattr(s, name) < low:
            raise UsageError(f"expected {name} of at least {low}, got {getattr(s, name)}")
    if s.max_tokens == 1:
        raise UsageError("expected max_tokens of at least 2, which make a pair, or 0 for all, got 1")
    for name in ("weight", "lr", "noise_alpha"):
        if not 0 <= getattr(s, name) < math.inf:
            raise UsageError(f"expected {name} of at least 0 and finite, got {getattr(s, name)}")
    for seed in s.seeds:
        if not 0 <= seed < 2**32:
            raise UsageError(f"expected seeds from 0 to {2**32 - 1}, got {seed}")
    if s.lora is not None:
        Lora.of(s.lora)
        if s.from_scratch:
            raise UsageError("expected lora without from_scratch: adapters on random weights learn nothing")
        if FORGET in s.arms:
            raise UsageError(f"expected lora without the arm {FORGET}, whose embeddings have to be trained")
    if len(set(s.arms)) < len(s.arms) or len(set(s.seeds)) < len(s.seeds):
        raise UsageError("expected each arm and each seed once")
    if not s.steps:
        raise UsageError(f"expected tokens for at least one step of {s.step_tokens}, got {s.tokens}")
    if "cross_domain_push_away" in s.arms and not s.second_data:
        raise UsageError("expected --second-data with cross_domain_push_away, whose pairs are of two domains")
    if FORGET in s.arms and s.forget_every >= s.steps:
        raise UsageError(
            f"expected forget_every below the {s.steps} steps of an arm, got {s.forget_every}; "
            "with this the arm active_forgetting would be the base"
        )
