"""Token sets, a domain's words (T) or the reference's (R), and the rows that stand for them in a vocabulary.

``math`` is a bundled set, ``my.yaml`` a file in the same layout, and ``math:digits,operators`` takes other
groups than the set's defaults; ``reference:bare`` takes the words in another variant than the file says. What
each key means is in ``docs/reference/token-sets.md``.

Resolving looks each word of T and R up as one exact piece, in the one variant that its group names (``7``
bare, ``␣the`` spaced), without falling back to the other: the leading space is a direction of its own. What
is missing is dropped and listed, rows of T are taken out of R, and sets that end up too small are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast, get_args

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.vocabulary import DigitScheme, Vocabulary
from lmeval_screener.yaml_fields import load_yaml, mistake, nearest

if TYPE_CHECKING:
    from lmeval_screener.tokens.answers import AnswerSet

Role = Literal["domain", "reference"]
Variant = Literal["bare", "space"]

_CASES: dict[str, Callable[[str], str]] = {
    "exact": str,
    "lower": str.lower,
    "upper": str.upper,
    "title": str.capitalize,
}
# Part of every kept resolution's key: raise it when the rule or the layout of an entry changes.
RESOLUTIONS = 6
DOMAIN = "math"  # where neither a domain nor a task is named
_SELECTION = re.compile(r"(?P<name>.+):(?P<groups>[\w\-]+(,[\w\-]+)*)")


@dataclass(frozen=True)
class Group:
    """Words of one token set that are looked up the same way."""

    variant: Variant  # ``bare`` looks ``7`` up, ``space`` looks ``␣the`` up
    items: tuple[str, ...]  # surface forms without a leading space, all different
    case: Literal["exact", "lower", "upper", "title"] = "exact"
    require_all: bool = False  # a vocabulary that lacks one of the items is refused
    optional: bool = False  # taken only when it is selected by name

    def texts(self) -> list[str]:
        """The surface forms that are looked up, leading space included, in the order of ``items``."""
        space = " " if self.variant == "space" else ""
        return [space + _CASES[self.case](item) for item in self.items]


@dataclass(frozen=True)
class _File:
    """The layout of a token set's file, see ``docs/reference/token-sets.md``."""

    schema: Literal[1]
    name: str
    role: Role
    default_groups: tuple[str, ...]
    min_tokens: Annotated[int, 2]
    groups: dict[str, Group]
    sources: Any = None
    notes: Any = None


@dataclass(frozen=True)
class TokenSet:
    """A domain's (T) or the reference's (R) words."""

    name: str  # with selected groups ``math:digits,operators``
    role: Role
    min_tokens: int  # the set is refused where fewer of its words resolve
    groups: dict[str, Group]  # those that are taken, in order
    digest: str  # sha256 over all that decides a resolution (not over notes)
    answers: AnswerSet | None = None  # what the ratio is over; None: T
    task: str = ""  # whose answers they are, where a task was named; of a file its name
    tasks: tuple[str, ...] = ()  # those of lm-eval that this means

    @property
    def title(self) -> str:
        """The task that was named, else the set's own name."""
        return self.task or self.name


def bundled_token_sets() -> list[str]:
    """Names of the token sets that come with the package, sorted."""
    return sorted(path.stem for path in data_folder("token_sets").glob("*.yaml"))


def described_groups(name: str) -> list[tuple[Role, str, Group, bool]]:
    """Every group of a bundled set: the set's role, the group's name, the group, and whether it is taken."""
    file = load_yaml(_File, data_folder("token_sets") / f"{name}.yaml")
    return [(file.role, key, group, key in file.default_groups) for key, group in file.groups.items()]


def load_token_set(name_or_path: str, role: Role = "domain") -> TokenSet:
    """A token set by name, by file, or with chosen groups."""
    name, selected = name_or_path, None
    path = _path(name)
    if path is None and (match := _SELECTION.fullmatch(name_or_path)):
        name, selected = match["name"], tuple(match["groups"].split(","))
        path = _path(name)
    if path is None:
        names = bundled_token_sets()
        raise UsageError(
            f"there is no token set {name!r}{nearest(name, names)}; bundled: {', '.join(names)}; "
            "a file of your own is given by its path, ending in .yaml"
        )
    return _read(path, role, selected)


def load_domain(name: str | None = None, task: str | None = None) -> TokenSet:
    """T of G and of the ratio: a domain's set, and the answers of a task or those known of the domain.

    With a task alone, G is over the domain that its answers name, or over the answers.
    """
    from lmeval_screener.tokens.answers import LEAST, answers_of_domain, load_answers

    answers = load_answers(task) if task else answers_of_domain(name or DOMAIN)
    if answers is None or not (task or answers.tasks):
        return load_token_set(name or DOMAIN)  # it consists of answers itself, or they are not known
    if name or answers.domain:
        words = load_token_set(name or answers.domain)
    else:
        words = TokenSet(answers.name, "domain", LEAST, {}, "")
    digest = hashlib.sha256(f"{words.digest} {answers.digest}".encode()).hexdigest()
    tasks: tuple[str, ...] = (task,) if task else ()
    if task and task.endswith((".yaml", ".yml")):
        task, tasks = answers.name, tuple(name for name in answers.tasks if not set("*?[") & set(name))
    return replace(words, answers=answers, task=task or "", tasks=tasks, digest=digest)


def _path(name: str) -> Path | None:
    """The file that ``name`` means, or None for what is neither a bundled name nor looks like a path."""
    if name.endswith((".yaml", ".yml")):
        return Path(os.path.expanduser(name))
    return data_folder("token_sets") / f"{name}.yaml" if name in bundled_token_sets() else None


def _read(path: Path, role: Role, selected: tuple[str, ...] | None) -> TokenSet:
    file = load_yaml(_File, path)
    groups = file.groups
    for name, group in groups.items():
        for position, item in enumerate(group.items):
            key = f"groups.{name}.items[{position}]"
            if item != item.strip():
                raise mistake(path, key, "a word without spaces around it", item, "use `variant: space`")
            if not item.isprintable():
                raise mistake(path, key, "printable signs", item)
    for position, default in enumerate(file.default_groups):
        if default not in groups or groups[default].optional:
            known = f"one of the groups {', '.join(groups)}"
            expected = "a group that is not optional" if default in groups else known
            raise mistake(path, f"default_groups[{position}]", expected, default)
    if file.role != role:
        raise mistake(path, "role", f"{role} (it is used as the {role} set)", file.role)
    # A group of that name wins: it is the file's own word.
    variants = [name for name in selected or () if name in get_args(Variant) and name not in groups]
    if len(variants) > 1:
        raise UsageError(f"{path}: expected one variant, got {' and '.join(variants)}; take one")
    chosen = [name for name in selected or () if name not in variants]
    for name in chosen:
        if name not in groups:
            raise UsageError(
                f"{path}: there is no group {name!r}{nearest(name, groups)}; there are "
                f"{', '.join(groups)}, and the variants bare and space"
            )
    taken = {key: groups[key] for key in dict.fromkeys(chosen or file.default_groups)}
    for variant in variants:
        taken = {key: replace(group, variant=cast(Variant, variant)) for key, group in taken.items()}
    size = sum(len(group.items) for group in taken.values())
    if size < file.min_tokens:
        raise UsageError(
            f"{path}: expected at least {file.min_tokens} words (`min_tokens`) in {', '.join(taken)}, got "
            f"{size}; take more groups"
        )
    return TokenSet(
        name=f"{file.name}:{','.join(dict.fromkeys(selected))}" if selected else file.name,
        role=role,
        min_tokens=file.min_tokens,
        groups=taken,
        digest=_digest(file.min_tokens, taken),
    )


def _digest(min_tokens: int, groups: dict[str, Group]) -> str:
    content = [min_tokens, [[name, group.require_all, group.texts()] for name, group in groups.items()]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class Token(NamedTuple):
    """One word that resolved: its surface form, the vocabulary's piece, the row's id, and its group."""

    text: str
    piece: str
    id: int
    group: str


@dataclass(frozen=True)
class Resolution:
    """The rows that stand for T and R in one vocabulary."""

    domain: tuple[Token, ...]  # T in the order of the token set
    reference: tuple[Token, ...]  # R likewise, without the rows of T
    dropped: tuple[str, ...]  # surface forms of T that are no single piece
    dropped_reference: tuple[str, ...]  # the same of R
    never_made: tuple[str, ...]  # those of them whose piece is there but never made of text, with the reason
    shared: tuple[Token, ...]  # tokens of R that are rows of T, and so were taken out of R
    one_row: tuple[str, ...]  # words of one set that the vocabulary puts on one row, which counts once
    digit_scheme: DigitScheme  # how numbers are cut up, see `Vocabulary.digit_scheme`
    vocabulary: int  # rows that the tokenizer names: its last id + 1; a padded matrix has more
    answers: tuple[Token, ...] = ()  # T of the ratio, none of them in R; empty where none are known

    @property
    def of_ratio(self) -> tuple[Token, ...]:
        """T of the ratio."""
        return self.answers or self.domain

    @property
    def compared(self) -> tuple[Token, ...]:
        """All tokens whose rows are read: T, R, and T of the ratio."""
        return *self.domain, *self.reference, *self.answers

    @property
    def domain_ids(self) -> list[int]:
        """Row ids of T, in its order."""
        return [token.id for token in self.domain]

    @property
    def reference_ids(self) -> list[int]:
        """Row ids of R, in its order."""
        return [token.id for token in self.reference]

    @classmethod
    def from_json(cls, content: bytes | str) -> Resolution:
        """The resolution that `to_json` wrote."""
        fields = json.loads(content)
        for name, value in fields.items():
            if name in ("domain", "reference", "shared", "answers"):
                fields[name] = tuple(Token(*token) for token in value)
            elif isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)

    def to_json(self) -> str:
        """Everything."""
        return json.dumps(vars(self))


def resolve(domain: TokenSet, reference: TokenSet, vocabulary: Vocabulary) -> Resolution:
    """The rows of T and R in a vocabulary, by the rule in the module's docstring."""
    tokens, dropped, doubled = lookup(domain, vocabulary)
    answers: tuple[Token, ...] = ()
    if domain.answers is not None:
        from lmeval_screener.tokens.answers import resolve_answers

        # Those that a vocabulary lacks are an error only where they were asked for.
        with contextlib.nullcontext() if domain.task else contextlib.suppress(ScreeningError):
            answers = resolve_answers(domain.answers, vocabulary, reference)
    tokens = tokens if domain.groups else list(answers)
    rows_of_domain = {token.id for token in tokens}
    everyday, dropped_reference, doubled_reference = lookup(reference, vocabulary)
    kept = tuple(token for token in everyday if token.id not in rows_of_domain)
    shared = tuple(token for token in everyday if token.id in rows_of_domain)
    _check_count(domain, len(tokens), dropped)
    taken = f", {len(shared)} belong to {domain.name}" if shared else ""
    _check_count(reference, len(kept), dropped_reference, taken)
    missing = dict.fromkeys((*dropped, *dropped_reference))
    return Resolution(
        domain=tuple(tokens),
        reference=kept,
        dropped=tuple(dropped),
        dropped_reference=tuple(dropped_reference),
        never_made=tuple(
            _with_reason(text, vocabulary).strip() for text in missing if vocabulary.never_made(text)
        ),
        shared=shared,
        one_row=(*doubled, *doubled_reference),
        digit_scheme=vocabulary.digit_scheme(),
        vocabulary=vocabulary.size,
        answers=tuple(tokens) if {token.id for token in answers} == rows_of_domain else answers,
    )


def lookup(words: TokenSet, vocabulary: Vocabulary) -> tuple[list[Token], list[str], list[str]]:
    """Tokens of a set, each row once; the surface forms without a row; and those that share one."""
    tokens: dict[int, Token] = {}
    dropped: list[str] = []
    doubled: list[str] = []
    for name, group in words.groups.items():
        missing = []
        for text in group.texts():
            row = vocabulary.row(text)
            if row is None:
                missing.append(text)
                continue
            first = tokens.setdefault(row[0], Token(text, row[1], row[0], name))
            if first.text == text:
                continue
            doubled.append(f"{first.text.strip()} and {text.strip()}")
            if group.require_all:
                raise ScreeningError(
                    "TooFewTokens",
                    f"{words.name}: expected a row for each of the {len(group.items)} items of {name}, "
                    f"but {doubled[-1]} share row {row[0]}; the tokenizer file is damaged, save it again",
                )
        if missing and group.require_all:
            raise ScreeningError(
                "TooFewTokens",
                f"{words.name}: expected all {len(group.items)} items of {name} as single tokens, "
                f"{len(missing)} are not: {_shown([_with_reason(text, vocabulary) for text in missing])}",
            )
        dropped += missing
    return list(tokens.values()), list(dict.fromkeys(dropped)), list(dict.fromkeys(doubled))


def _with_reason(text: str, vocabulary: Vocabulary) -> str:
    why = vocabulary.never_made(text)
    return text if why is None else f"{text} ({why})"


def _check_count(words: TokenSet, count: int, dropped: list[str], also: str = "") -> None:
    if count < words.min_tokens:
        asked = len({text for group in words.groups.values() for text in group.texts()})
        missing = f"; no single token: {_shown(dropped)}" if dropped else ""
        raise ScreeningError(
            "TooFewTokens",
            f"{words.name}: expected at least {words.min_tokens} single tokens, found {count} of {asked}"
            f"{also}{missing}; take more groups or a token set made for this vocabulary",
        )


def _shown(texts: list[str]) -> str:
    first = ", ".join(text.strip() for text in texts[:6])
    return first if len(texts) <= 6 else f"{first} and {len(texts) - 6} more"
