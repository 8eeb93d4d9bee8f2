"""Token sets (a domain's words T, the reference's R) and answer sets; lookup of words in a vocabulary.

``math`` is a bundled set, ``my.yaml`` a file in the same layout, and ``math:digits,operators`` takes other
groups than the set's defaults; ``reference:bare`` takes the words in another variant than the file's. The
keys' meanings are in ``docs/reference/token-sets.md``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.layouts import mistake, nearest
from lmeval_screener.budgets import load_yaml
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.vocabulary import Vocabulary

Role = Literal["domain", "reference"]
Variant = Literal["bare", "space"]
MOST = 100  # answer tokens at most
_RULE = 2  # how `answers.differing` chooses tokens: raise it when that changes, for registries
READ = 36  # a task's answer tokens that are read: at most a tenth more bytes than keywords

_CASES: dict[str, Callable[[str], str]] = {
    "exact": str,
    "lower": str.lower,
    "upper": str.upper,
    "title": str.capitalize,
}
_SELECTION = re.compile(r"(?P<name>.+):(?P<groups>[\w\-]+(,[\w\-]+)*)")


@dataclass(frozen=True)
class AnswerSet:
    """A task's answers, as texts or as the pieces that a base model expects."""

    name: str
    tasks: tuple[str, ...]  # lm-eval's names, or shell patterns of them
    domain: str = ""  # bundled domain set that G uses; empty: G is over the answer tokens too
    about: str = ""  # ``answers of gsm8k (1,319 documents)``
    answers: dict[str, Annotated[int, 1]] = field(
        default_factory=dict
    )  # text after a prompt -> its count
    pieces: tuple[str, ...] = ()  # pieces that a base expects, most probable first
    tokenizer: str = ""  # `Vocabulary.digest` of the base's tokenizer
    base: str = ""  # the model that expects ``pieces``
    most: Annotated[int, 3] = READ  # tokens of ``answers`` that are read

    @property
    def digest(self) -> str:
        """SHA-256 over everything that decides the tokens."""
        answers = sorted(self.answers.items())
        return _digest(_RULE, answers, self.pieces, self.tokenizer, self.most)


@dataclass(frozen=True)
class WordGroup:
    """Words in a token set that are looked up in the same way."""

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
    groups: dict[str, WordGroup]
    tasks: tuple[str, ...] = ()
    sources: Any = None
    notes: Any = None


@dataclass(frozen=True)
class TokenSet:
    """The words of a domain (T) or of the reference (R)."""

    name: str  # with selected groups ``math:digits,operators``
    role: Role
    min_tokens: int  # the set is refused if fewer of its words resolve
    groups: dict[str, WordGroup]  # the selected groups, in order
    digest: str  # sha256 over everything that decides a resolution (not over notes)
    answers: AnswerSet | None = None  # answers for the ratio; None: T
    task: str = ""  # the named task or file of the answers; empty for none
    tasks: tuple[str, ...] = ()  # lm-eval tasks that evaluate it
    remark: str = ""  # why the ratio's tokens are not those of the first task

    @property
    def title(self) -> str:
        """The named task, else the set's own name."""
        return self.task or self.name


def bundled_token_sets() -> list[str]:
    """Names of the bundled token sets, sorted."""
    return sorted(path.stem for path in data_folder("token_sets").glob("*.yaml"))


def described_groups(name: str) -> list[tuple[Role, str, WordGroup, bool]]:
    """Role, name, words and default (whether it is taken) of each group in a bundled set."""
    file = load_yaml(_File, data_folder("token_sets") / f"{name}.yaml")
    groups: list[tuple[Role, str, WordGroup, bool]] = []
    for key, group in file.groups.items():
        groups.append((file.role, key, group, key in file.default_groups))
    return groups


def load_token_set(name_or_path: str, role: Role = "domain") -> TokenSet:
    """Load a token set by name or file, with its default or chosen groups; UsageError if it is unfit."""
    name = name_or_path
    selected: list[str] = []
    path = _path(name)
    selection = _SELECTION.fullmatch(name)
    if path is None and selection:
        name = selection["name"]
        selected = selection["groups"].split(",")
        path = _path(name)
    if path is None:
        names = bundled_token_sets()
        raise UsageError(
            f"unknown token set {name!r}{nearest(name, names)}; bundled: {', '.join(names)}; "
            "give a file of your own by its path, ending in .yaml"
        )
    return _read(path, role, selected)


def is_file(name: str) -> bool:
    """Whether ``name`` is a file of a set, by its suffix; it need not exist."""
    return name.endswith((".yaml", ".yml"))


def _path(name: str) -> Path | None:
    """The file of ``name``; None if it is neither a bundled name nor looks like a path."""
    if is_file(name):
        return Path(name).expanduser()
    if name not in bundled_token_sets():
        return None
    return data_folder("token_sets") / f"{name}.yaml"


def _read(path: Path, role: Role, selected: list[str]) -> TokenSet:
    file = load_yaml(_File, path, {"answers": "answers of a task: give it as the task"})
    groups = file.groups
    for name, group in groups.items():
        for position, item in enumerate(group.items):
            key = f"groups.{name}.items[{position}]"
            if item != item.strip():
                raise mistake(
                    path, key, "a word without spaces around it", item, "use `variant: space`"
                )
            if not item.isprintable():
                raise mistake(path, key, "printable signs", item)
    for position, default in enumerate(file.default_groups):
        if default not in groups or groups[default].optional:
            known = f"one of the groups {', '.join(groups)}"
            expected = "a group that is not optional" if default in groups else known
            raise mistake(path, f"default_groups[{position}]", expected, default)
    if file.role != role:
        raise mistake(path, "role", f"{role} (it is used as the {role} set)", file.role)
    # A group of that name wins: it is the file's own name.
    variants = [name for name in selected if name in get_args(Variant) and name not in groups]
    if len(variants) > 1:
        raise UsageError(f"{path}: expected one variant, got {' and '.join(variants)}; take one")
    chosen = [name for name in selected if name not in variants]
    for name in chosen:
        if name not in groups:
            raise UsageError(
                f"{path}: unknown group {name!r}{nearest(name, groups)}; expected one of "
                f"{', '.join(groups)}, or a variant (bare, space)"
            )
    taken: dict[str, WordGroup] = {}
    for key in chosen or file.default_groups:
        taken[key] = groups[key]
        if variants:
            taken[key] = replace(groups[key], variant=cast(Variant, variants[0]))
    size = sum(len(group.items) for group in taken.values())
    if size < file.min_tokens:
        raise UsageError(
            f"{path}: expected at least {file.min_tokens} words (`min_tokens`) in {', '.join(taken)}, got "
            f"{size}; take more groups"
        )
    name = file.name
    if selected:
        name += f":{','.join(dict.fromkeys(selected))}"
    return TokenSet(
        name=name,
        role=role,
        min_tokens=file.min_tokens,
        groups=taken,
        digest=_digest(
            file.min_tokens,
            [[name, group.require_all, group.texts()] for name, group in taken.items()],
        ),
        tasks=file.tasks,
    )


def _digest(*content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class Token(NamedTuple):
    """One resolved word: its surface form, the vocabulary's piece, the row's id, and its group."""

    text: str
    piece: str
    id: int
    group: str


def lookup(words: TokenSet, vocabulary: Vocabulary) -> tuple[list[Token], list[str], list[str]]:
    """A set's tokens, each row once; texts without a row; and pairs of texts that share a row.

    ScreeningError if a word of a group with ``require_all`` has no row of its own.
    """
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
            at, piece = row
            first = tokens.setdefault(at, Token(text, piece, at, name))
            if first.text == text:
                continue
            doubled.append(f"{first.text.strip()} and {text.strip()}")
            if group.require_all:
                raise ScreeningError(
                    "TooFewTokens",
                    f"{words.name}: expected a row for each of the {len(group.items)} items of {name}, "
                    f"but {doubled[-1]} share row {at}; the tokenizer file is damaged, save it again",
                )
        if missing and group.require_all:
            reasons = [with_reason(text, vocabulary) for text in missing]
            raise ScreeningError(
                "TooFewTokens",
                f"{words.name}: expected all {len(group.items)} items of {name} as single tokens, "
                f"{len(missing)} are not: {some_words(reasons)}",
            )
        dropped += missing
    return list(tokens.values()), list(dict.fromkeys(dropped)), list(dict.fromkeys(doubled))


def with_reason(text: str, vocabulary: Vocabulary) -> str:
    """A word, with the reason in brackets if the tokenizer never makes its token from text."""
    why = vocabulary.never_made(text)
    return text if why is None else f"{text} ({why})"


def some_words(texts: list[str]) -> str:
    """The first six words, and the number of others."""
    words = ", ".join(text.strip() for text in texts[:6])
    if len(texts) > 6:
        words += f" and {len(texts) - 6} more"
    return words
