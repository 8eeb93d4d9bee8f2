"""Token sets (a domain's words T, the reference's R) and answer sets; lookup of words in a vocabulary.

``math`` is a bundled set, ``my.yaml`` a file in the same layout, and ``math:digits,operators``
takes other groups than the set's defaults; ``reference:bare`` takes the words in another variant
than the file's. The keys' meanings are in ``docs/reference/token-sets.md``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
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
    """The answers of a task: texts with their counts, or tokens that a base model expects.

    Attributes:
        name: Name of the set.
        tasks: Names of lm-eval tasks, or shell patterns for such names.
        domain: The bundled token set from which the gap G, the screen's second figure, is computed;
            empty to compute G from the answers, like the ratio.
        about: What the set holds, such as ``answers of gsm8k (1,319 documents)``.
        answers: Each answer, as it follows the prompt, with the number of its occurrences.
        pieces: Tokens with which a base model begins its answers, most probable first, in the
            spelling of the vocabulary. Either ``answers`` or ``pieces`` is empty.
        tokenizer: `Vocabulary.digest` of the base model's tokenizer; empty without ``pieces``.
        base: The base model that gave ``pieces``; empty without ``pieces``.
        most: Maximum number of tokens to take from ``answers``.
    """

    name: str
    tasks: tuple[str, ...]
    domain: str = ""
    about: str = ""
    answers: dict[str, Annotated[int, 1]] = field(default_factory=dict)
    pieces: tuple[str, ...] = ()
    tokenizer: str = ""
    base: str = ""
    most: Annotated[int, 3] = READ

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides which tokens are chosen, as a hexadecimal string."""
        answers = sorted(self.answers.items())
        return _digest(_RULE, answers, self.pieces, self.tokenizer, self.most)


@dataclass(frozen=True)
class WordGroup:
    """Words of a token set that are looked up in a vocabulary in the same way.

    Attributes:
        variant: ``bare`` to look the words up as they are (``7``), ``space`` to look them up with a
            leading space (``␣the``).
        items: The words, without a leading space, all different.
        case: How the words are written: ``exact`` (as in ``items``), ``lower``, ``upper`` or
            ``title``.
        require_all: Whether a vocabulary is refused if one of the words is not a single token.
        optional: Whether the group is taken only if the user selects it by its name.
    """

    variant: Variant
    items: tuple[str, ...]
    case: Literal["exact", "lower", "upper", "title"] = "exact"
    require_all: bool = False
    optional: bool = False

    def texts(self) -> list[str]:
        """Return the texts to look up: the items in their ``case`` and ``variant``, in order."""
        space = " " if self.variant == "space" else ""
        written = _CASES[self.case]
        texts: list[str] = []
        for item in self.items:
            texts.append(space + written(item))
        return texts


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
    """The words of a domain (T), or everyday words for comparison (R), in the selected groups.

    Attributes:
        name: Name of the set, followed by the selected groups: ``math:digits,operators``.
        role: ``domain`` for T, ``reference`` for R.
        min_tokens: How many of the words must be single tokens of a vocabulary; one with fewer is
            refused.
        groups: The selected groups by name, in order.
        digest: SHA-256 of everything that decides which tokens are taken, as a hexadecimal string.
        answers: The answers whose tokens give the ratio; None if the words themselves do.
        task: The task or answer set that the user named; empty if the user named none.
        tasks: Names of lm-eval tasks that test the domain.
        remark: Why the ratio does not use the answers of the first task that the user named; empty
            if the ratio uses them, or if the user named no task.
    """

    name: str
    role: Role
    min_tokens: int
    groups: dict[str, WordGroup]
    digest: str
    answers: AnswerSet | None = None
    task: str = ""
    tasks: tuple[str, ...] = ()
    remark: str = ""

    @property
    def title(self) -> str:
        """The task that the user named, or the name of the set if the user named none."""
        return self.task or self.name


def bundled_token_sets() -> list[str]:
    """Return the names of the bundled token sets, sorted."""
    return sorted(path.stem for path in data_folder("token_sets").glob("*.yaml"))


def described_groups(name: str) -> list[tuple[Role, str, WordGroup, bool]]:
    """Return the groups of words in a bundled token set.

    Returns:
        For each group, four values: the role of the set, the name of the group, the group itself,
        and whether it is taken by default.
    """
    file = load_yaml(_File, data_folder("token_sets") / f"{name}.yaml")
    groups: list[tuple[Role, str, WordGroup, bool]] = []
    for key, group in file.groups.items():
        groups.append((file.role, key, group, key in file.default_groups))
    return groups


def load_token_set(name_or_path: str, role: Role = "domain") -> TokenSet:
    """Load a token set, bundled or from a file, with its default groups or with selected ones.

    Args:
        name_or_path: The name of a set, or a path that ends in .yaml or .yml. Groups or a variant
            may follow after a colon: ``math:digits``, ``reference:bare``.
        role: The role that the set must have: ``domain`` or ``reference``.

    Raises:
        UsageError: No set or group has this name, the file is broken or has another role, or the
            groups have too few words.
    """
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
            "for a file of your own, give a path that ends in .yaml"
        )
    return _read(path, role, selected)


def is_file(name: str) -> bool:
    """Whether ``name`` is the path of a YAML file, by its ending; the file need not exist."""
    return name.endswith((".yaml", ".yml"))


def _path(name: str) -> Path | None:
    """The file of ``name``; None if it is neither a bundled name nor looks like a path."""
    if is_file(name):
        return Path(name).expanduser()
    if name not in bundled_token_sets():
        return None
    return data_folder("token_sets") / f"{name}.yaml"


def _check_file(path: Path, file: _File, role: Role) -> None:
    """Refuse a token set's file whose words, default groups or role cannot be used."""
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
        raise mistake(path, "role", f"{role} (the set is used as the {role})", file.role)


def _read(path: Path, role: Role, selected: list[str]) -> TokenSet:
    file = load_yaml(_File, path, {"answers": "answers of a task, not words: give it as the task"})
    groups = file.groups
    _check_file(path, file, role)
    variants: list[str] = []
    chosen: list[str] = []
    for name in selected:
        # A group of that name wins: it is the file's own name.
        is_variant = name in get_args(Variant) and name not in groups
        if is_variant:
            variants.append(name)
        else:
            chosen.append(name)
    if len(variants) > 1:
        raise UsageError(f"{path}: expected one variant, got {' and '.join(variants)}; take one")
    for name in chosen:
        if name not in groups:
            raise UsageError(
                f"{path}: unknown group {name!r}{nearest(name, groups)}; expected one of "
                f"{', '.join(groups)}, or a variant (bare, space)"
            )
    taken: dict[str, WordGroup] = {}
    for key in chosen or file.default_groups:
        group = groups[key]
        if variants:
            group = replace(group, variant=cast(Variant, variants[0]))
        taken[key] = group
    size = 0
    deciding: list[list[Any]] = []
    for key, group in taken.items():
        size += len(group.items)
        deciding.append([key, group.require_all, group.texts()])
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
        digest=_digest(file.min_tokens, deciding),
        tasks=file.tasks,
    )


def _digest(*content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class Token(NamedTuple):
    """A word that is exactly one token of a vocabulary, or a token of a task's answers.

    Attributes:
        text: The text of the token, with a leading space if it has one.
        piece: The vocabulary's spelling of the text, such as ``Ġthe``.
        id: The token id, which is also the number of the token's row in the output projection.
        group: Name of the word's group in the token set, or of the answer set.
    """

    text: str
    piece: str
    id: int
    group: str


def lookup(words: TokenSet, vocabulary: Vocabulary) -> tuple[list[Token], list[str], list[str]]:
    """Look up the words of a token set in a vocabulary.

    Returns:
        Three lists: the tokens, each token id once; the words that are not a single token; and
        pairs of words that have the same token, as ``A and B``.

    Raises:
        ScreeningError: ``TooFewTokens``: a word has no token of its own, in a group that needs all
            its words (``require_all``).
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
                    f"{words.name}: expected a token id for each of the {len(group.items)} items "
                    f"of {name}, but {doubled[-1]} share row {at}; the tokenizer's file is "
                    "damaged: save the tokenizer again",
                )
        if missing and group.require_all:
            reasons = [with_reason(text, vocabulary) for text in missing]
            raise ScreeningError(
                "TooFewTokens",
                f"{words.name}: expected all {len(group.items)} items of {name} as single tokens, "
                f"got {len(group.items) - len(missing)}; not a single token: "
                f"{some_words(reasons)}; name another domain",
            )
        dropped += missing
    return list(tokens.values()), list(dict.fromkeys(dropped)), list(dict.fromkeys(doubled))


def with_reason(text: str, vocabulary: Vocabulary) -> str:
    """Return a word, with the reason in brackets if the tokenizer never makes its token."""
    why = vocabulary.never_made(text)
    return text if why is None else f"{text} ({why})"


def some_words(texts: Sequence[str], most: int = 6) -> str:
    """Join the first ``most`` words by commas, followed by the number of further words, if any."""
    words = ", ".join(text.strip() for text in texts[:most])
    if len(texts) > most:
        words += f" and {len(texts) - most} more"
    return words
