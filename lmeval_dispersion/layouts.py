"""Content of files, checked against the types that describe it: type, range and allowed values.

An error says in one sentence what does not fit: the file, the key, what was expected and what was
given. A layout is a dataclass, a TypedDict or a NamedTuple of fields with these types:

- ``str`` (not empty), ``Text`` (may be empty), ``bool``, ``int``, ``float`` (finite), ``bytes``, ``Any``;
- ``Annotated[int, low]``, ``Annotated[float, low, high]``: a number in that range, ends included;
- ``Annotated[str, Form]``: a text of a form, such as `PlainName` or `Place`;
- ``Literal``, and unions, such as ``int | None``;
- ``tuple[X, ...]``: at least one, and different texts; ``Sequence[X]``: any number; ``tuple[X, Y]``: a pair;
- ``dict`` or ``Mapping`` of texts to any of these, and other layouts.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from lmeval_dispersion.errors import DispersionError, UsageError, beginning, brief

T = TypeVar("T")
_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
    type(None): "nothing",
}
_LARGEST = 2**63 - 1  # of an integer without a range, as arrays hold them
_NAME = 200  # characters: file systems take 255 bytes, with what is put before and after
_PLACE = 4096  # characters: the longest path of Linux


@dataclasses.dataclass(frozen=True)
class Form:
    """A form that a layout demands of a text, such as that of a plain file name.

    Attributes:
        fits: Function that says whether a text has the form.
        words: What such a text is, for messages, such as ``a plain file name``.
    """

    fits: Callable[[str], bool]
    words: str


def is_plain(name: str) -> bool:
    """Whether a text is safe as the name of a file: up to 200 printable characters, not hidden.

    Separators, ``..`` and the other characters that Windows or globs reserve are not allowed.

    >>> [name for name in ("gsm8k", "2026-11-28T10-00-00", "../gsm8k", "a/b", "") if is_plain(name)]
    ['gsm8k', '2026-11-28T10-00-00']
    """
    has_length = 0 < len(name) <= _NAME
    has_signs = name.isprintable() and not set(name) & set('/\\:*?[]"<>|')
    return has_length and has_signs and ".." not in name and not name.startswith(".")


def _is_place(text: str) -> bool:
    return 0 < len(text) <= _PLACE and "\0" not in text


def _is_label(text: str) -> bool:
    return _is_place(text) and not any("\ud800" <= sign <= "\udfff" for sign in text)


Label = Annotated[str, Form(_is_label, "a name in UTF-8")]
Text = Annotated[str, Form(lambda text: True, "a string")]
_FILLED = Form(lambda text: bool(text.strip()), "a string")
Place = Annotated[str, Form(_is_place, "a name, a path or an address")]
PlainName = Annotated[str, Form(is_plain, f"a plain file name of at most {_NAME} characters")]


def mistake(
    source: object, key: str, expected: str, given: object, step: str = ""
) -> DispersionError:
    """Return the UsageError ``SOURCE: `KEY`: expected EXPECTED, got GIVEN; STEP``.

    ``given`` is shown with its type and at most 60 characters. An empty ``key`` or ``step`` is left
    out of the message.
    """
    return _Check(source, "", UsageError).mistake(key, expected, given, step)


def similar_names(name: str, names: Collection[str]) -> list[str]:
    """Return up to three similar names, the most similar first; upper and lower case are equal.

    >>> similar_names("tinyMMUL", ["tinyMMLU", "gsm8k"])
    ['tinyMMLU']
    """
    import difflib

    by_lower: dict[str, str] = {}
    for candidate in names:
        by_lower.setdefault(candidate.lower(), candidate)
    near = difflib.get_close_matches(name[:_NAME].lower(), list(by_lower), n=3)
    return [by_lower[lower] for lower in near]


def nearest(name: str, names: Collection[str]) -> str:
    """Return ``"; did you mean …?"`` with up to three similar names; "" if none is similar.

    >>> nearest("maths", ["math", "code"])
    '; did you mean math?'
    """
    near = similar_names(name, names)
    return f"; did you mean {', '.join(near)}?" if near else ""


def checked(
    layout: type[T],
    content: Any,
    source: object,
    repair: str = "",
    error: type[DispersionError] = UsageError,
) -> T:
    """Check the content of a file against its layout, and return it as an instance of the layout.

    A dataclass is instantiated and refuses keys that it does not declare. For a TypedDict, the
    mapping is returned, and further keys are allowed. A NamedTuple is made from a list.

    Args:
        layout: The dataclass, TypedDict or NamedTuple that describes the content.
        content: The parsed content.
        source: Name of the file in messages.
        repair: What to do about a damaged file, if the file was written by a program; else empty.
        error: Type of the error that is raised.

    Raises:
        DispersionError: The content does not fit; of the type ``error``, by default UsageError.
    """
    value: T = _Check(source, repair, error).value(layout, content, "")
    return value


@cache
def _hints(layout: Any) -> dict[str, Any]:
    return get_type_hints(layout, include_extras=True)


@cache
def _shape(kind: Any) -> tuple[str, tuple[Any, ...]]:
    """How a kind of value is checked, and the kinds or limits in it."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        return "fields", ()
    if hasattr(kind, "_fields"):
        return "named row", tuple(_hints(kind).values())
    if origin in (Union, types.UnionType):
        return "union", tuple(sorted(arguments, key=lambda part: part is type(None)))
    if origin in (dict, Mapping):
        return "mapping", arguments
    if origin is tuple:
        return "different" if arguments[-1] is ... else "row", arguments
    if origin in (list, Sequence):
        return "list", arguments
    return "plain", arguments


@dataclasses.dataclass(frozen=True)
class _Check:
    source: object
    repair: str
    error: type[DispersionError]

    def mistake(self, where: str, expected: str, given: object, step: str = "") -> DispersionError:
        place = f"`{where}`: " if where else ""
        kind = _NAMES.get(type(given), type(given).__name__)
        got = "" if given is None else f" {brief(given)}"
        return self.fault(f"{place}expected {expected}, got {kind}{got}", step)

    def fault(self, difference: str, step: str = "") -> DispersionError:
        """The error for a difference in words."""
        if self.repair:
            return self.error(f"{self.source} is damaged ({difference}); {self.repair}")
        end = f"; {step}" if step else ""
        return self.error(f"{self.source}: {difference}{end}")

    def value(self, kind: Any, value: Any, where: str) -> Any:
        """A value as its annotation describes it; ``where`` is a path of keys."""
        shape, arguments = _shape(kind)
        if shape == "fields":
            return self._fields(kind, value, where)
        if shape == "named row":
            return kind(*self._row(arguments, value, where))
        if shape == "union":
            return self._one_of(arguments, value, where)
        if shape == "mapping":
            return self._mapping(arguments, value, where)
        if shape == "different":
            return self._different(arguments[0], value, where)
        if shape == "row":
            return tuple(self._row(arguments, value, where))
        if shape == "list":
            return self._list(arguments[0], value, where)
        return self._plain(kind, arguments, value, where)

    def _plain(self, kind: Any, limits: tuple[Any, ...], value: Any, where: str) -> Any:
        """A value that holds no others; ``limits`` are a Literal's values, or a range or form."""
        if get_origin(kind) is Literal:
            if not any(type(value) is type(limit) and value == limit for limit in limits):
                names = ", ".join(map(str, limits))
                raise self.mistake(where, f"one of {names}" if len(limits) > 1 else names, value)
            return value
        if get_origin(kind) is Annotated:
            kind, *rest = get_args(kind)
            limits = tuple(rest)
        if kind is int or kind is float:
            return self._number(kind, limits, value, where)
        if kind is str:
            self._check_text(limits, value, where)
        elif kind is bytes and not isinstance(value, bytes):
            raise self.mistake(where, "bytes", value)
        elif kind is bool and not isinstance(value, bool):
            raise self.mistake(where, "true or false", value)
        elif kind is type(None) and value is not None:
            raise self.mistake(where, "nothing", value)
        return value

    def _check_text(self, limits: tuple[Any, ...], value: Any, where: str) -> None:
        form = limits[0] if limits else _FILLED
        if not isinstance(value, str):
            step = "quote it" if isinstance(value, bool | int | float) else ""
            raise self.mistake(where, form.words, value, step)
        if not form.fits(value):
            words = "a non-empty string" if form is _FILLED else form.words
            raise self.mistake(where, words, value)

    def _number(self, kind: type, limits: tuple[Any, ...], value: Any, where: str) -> int | float:
        """A number, finite and in its range; also an integer where a float is expected."""
        low, high = (*limits, None, None)[:2]
        is_kind = type(value) is int or (kind is float and type(value) is float)
        largest = _LARGEST if kind is int else math.inf
        lowest = -largest if low is None else low
        highest = largest if high is None else high
        is_finite = is_kind and -1.7e308 < value < 1.7e308  # false for NaN
        if is_finite and lowest <= value <= highest:
            return float(value) if kind is float else int(value)
        expected = _NAMES[kind]
        if high is not None:
            expected += f" from {low} to {high}"
        elif low is not None:
            expected += f" of at least {low}"
        raise self.mistake(where, expected, value)

    def _one_of(self, kinds: Sequence[Any], value: Any, where: str) -> Any:
        """A value of the first kind that it fits; else the error of the first kind."""
        if value is None and type(None) in kinds:
            return None
        errors = []
        for kind in kinds:
            try:
                return self.value(kind, value, where)
            except self.error as error:
                errors.append(error)
        raise errors[0]

    def _items(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.mistake(where, "a mapping", value)
        for key in value:
            if not isinstance(key, str):
                raise self.mistake(inside(where, key), "a key that is a string", key, "quote it")
        return value

    def _mapping(self, kinds: Sequence[Any], value: Any, where: str) -> dict[str, Any]:
        checked_items = {}
        for key, item in self._items(value, where).items():
            place = inside(where, key)
            if kinds[0] is not str:
                self.value(kinds[0], key, place)
            checked_items[key] = self.value(kinds[1], item, place)
        return checked_items

    def _fields(self, layout: Any, value: Any, where: str) -> Any:
        given = self._items(value, where)
        kinds = _hints(layout)
        if is_typeddict(layout):
            needed: Collection[str] = layout.__required_keys__
        else:
            # Both are MISSING: no default.
            needed = [f.name for f in dataclasses.fields(layout) if f.default is f.default_factory]
            for key in given:
                if key not in kinds:
                    keys = f"one of the keys {', '.join(kinds)}{nearest(key, kinds)}"
                    raise self.fault(f"`{inside(where, key)}`: expected {keys}")
        values = {}
        for name, kind in kinds.items():
            if name in given or name in needed:
                values[name] = self.value(kind, given.get(name), inside(where, name))
        for name in needed:
            if name not in given and values[name] is None:
                raise self.mistake(inside(where, name), "a value", None)
        return {**given, **values} if is_typeddict(layout) else layout(**values)

    def _row(self, kinds: Sequence[Any], value: Any, where: str) -> list[Any]:
        """A list of as many values as there are kinds."""
        if not isinstance(value, list) or len(value) != len(kinds):
            raise self.mistake(where, f"a list of {len(kinds)} values", value)
        pairs = enumerate(zip(kinds, value, strict=True))
        return [self.value(kind, item, f"{where}[{at}]") for at, (kind, item) in pairs]

    def _list(self, kind: Any, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.mistake(where, "a list", value)
        return [self.value(kind, item, f"{where}[{at}]") for at, item in enumerate(value)]

    def _different(self, kind: Any, value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not value:
            names = "strings" if kind is str else "mappings"
            raise self.mistake(where, f"a list of {names}", value)
        items = self._list(kind, value, where)
        seen = set[str]()
        for at, item in enumerate(items):
            if not isinstance(item, str):
                continue
            if item in seen:
                place = f"{where}[{at}]"
                raise self.mistake(place, "each item once", item, "remove the second one")
            seen.add(item)
        return tuple(items)


def inside(where: str, key: object) -> str:
    """Return the path of ``key`` in the mapping at the path ``where``, such as ``groups.words``.

    A key of more than 60 characters is shortened. ``where`` is "" for the whole content.
    """
    name = key if isinstance(key, str) else brief(key)
    short = beginning(name)
    return f"{where}.{short}" if where else short
