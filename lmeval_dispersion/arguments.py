"""One declaration of an argument: a dataclass's field is an option and a function's parameter.

The field has the type, the choices and the default; the ``Attributes`` of the class's docstring are
the help of the command (the first paragraph of each) and the ``Args`` of the function. A field
``minutes: Annotated[int, Option("N")] = 5`` with the text "Time on the fire." is ``--minutes N``,
*time on the fire (default: 5)*, and ``minutes=5`` in Python. What Python takes by position, a field
before ``KW_ONLY``, is a positional argument of the command.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.layouts import nearest

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_INDENT = 4  # of a docstring's section, and again of its entries
_DEFAULT = re.compile(r" Default: ([^.]*(?:\.\S[^.]*)*)\.$")


class Option(NamedTuple):
    """What the type of a field leaves open about its option.

    Attributes:
        metavar: The value's name in the help; None where there is none, or choices.
        names: The option's names; none for the field's own.
        action: What is done with the value; None to store it.
        type: Makes the value from its text; None for the field's own type.
    """

    metavar: str | None = None
    names: tuple[str, ...] = ()
    action: type[argparse.Action] | None = None
    type: Callable[[str], Any] | None = None


def add_options(
    parser: argparse._ActionsContainer,
    declared: type[Any],
    *names: str,
    dashed: bool = True,
    **more: Any,
) -> None:
    """Add an option, or a positional argument, for each field that a dataclass declares itself.

    Args:
        parser: The parser, or a group of it.
        declared: The dataclass.
        names: Fields that are wanted alone, in the order wanted, also those of its bases.
        dashed: Whether options have dashes where fields have underscores, which lm-eval's keep.
        more: Further arguments of each ``add_argument``, in place of those from the field; ``help``
            is a text as docstrings have it.
    """
    fields = {field.name: field for field in dataclasses.fields(declared)}
    hints = _hints(declared)
    texts = texts_of(declared)
    for name in names or declared.__annotations__:
        if name not in fields:  # the mark KW_ONLY
            continue
        field = fields[name]
        option = _option(hints[name])
        flags = option.names
        if field.kw_only and not flags:
            flags = (f"--{name.replace('_', '-')}",) if dashed else (f"--{name}",)
        settings = _settings(field, hints[name], option, positional=not flags)
        settings |= more
        text = more.get("help", texts[name])
        settings["help"] = _help(text, settings, positional=not flags)
        if flags:
            parser.add_argument(*flags, dest=name, **settings)
        else:
            parser.add_argument(name, **settings)


def _hints(declared: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    hints = dict[str, Any]()
    for base in reversed(declared.__mro__):
        hints |= _own_hints(base)
    return hints


@cache
def _own_hints(base: Callable[..., Any]) -> dict[str, Any]:
    """The types of the fields of a class alone; a name that type checkers alone import is Any."""
    unknown = dict[str, Any]()
    while True:
        try:
            return inspect.get_annotations(base, locals=unknown, eval_str=True)
        except NameError as error:
            unknown[str(error.name)] = Any


def _option(hint: Any) -> Option:
    for part in getattr(hint, "__metadata__", ()):
        if isinstance(part, Option):
            return part
    return Option()


def _types(hint: Any) -> list[Any]:
    """The types that a hint allows, without None."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [part for part in parts if part is not type(None)]


def _items(types: list[Any]) -> list[Any]:
    """The types of the items of those types that hold several values."""
    several = [kind for kind in types if get_origin(kind) in (Sequence, Iterable)]
    return [item for kind in several for item in _types(get_args(kind)[0])]


def _choices(hint: Any) -> list[Any]:
    """The values that a field may have, or each of its several values; empty for any."""
    types = _types(hint)
    literals = [kind for kind in [*types, *_items(types)] if get_origin(kind) is Literal]
    return list(dict.fromkeys(choice for kind in literals for choice in get_args(kind)))


def check_choices(asked: Any) -> None:
    """Check an options object's values against the choices of their fields.

    Raises:
        UsageError: A value is none of its field's choices; names the field.
    """
    hints = _hints(type(asked))
    for field in dataclasses.fields(asked):
        choices = _choices(hints[field.name])
        value = getattr(asked, field.name)
        if not choices or value is field.default:
            continue
        values = [value] if isinstance(value, str) or not isinstance(value, Iterable) else value
        for each in values:
            if each not in choices:
                expected = " or ".join(map(str, choices))
                raise UsageError(f"expected {expected}, got {each!r}", argument=field.name)


def _settings(
    field: dataclasses.Field[Any], hint: Any, option: Option, *, positional: bool
) -> dict[str, Any]:
    """The arguments of ``add_argument`` that follow from a field, but for its names and help."""
    types = _types(hint)
    if types == [bool]:
        return {"action": "store_true", "default": False}
    settings: dict[str, Any] = {"metavar": option.metavar}
    is_required = field.default is dataclasses.MISSING
    if not is_required:
        settings["default"] = field.default
    items = _items(types)
    choices = _choices(hint)
    if choices:
        settings["choices"] = choices
    if option.type:
        settings["type"] = option.type
    elif items[:1] == [int]:
        settings["type"] = _numbers
    elif types[0] in (int, float, Path) and str not in types:
        settings["type"] = types[0]
    if positional:
        if items:
            settings["nargs"] = "+" if is_required else "*"
        elif not is_required and not choices:  # `options.py` puts in a choice that is left out
            settings["nargs"] = "?"
        return settings
    if items and "type" not in settings:
        settings["action"] = "append"
        settings["default"] = []
    if is_required:
        settings["required"] = True
        settings.pop("default", None)
    if option.action:
        settings["action"] = option.action
    if bool in types:  # the option may be given without its value
        settings["nargs"] = "?"
        settings["const"] = True
    return settings


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers with commas, got {text!r}"
        ) from None


def _help(text: str, settings: dict[str, Any], *, positional: bool) -> str:
    """A field's text as argparse's help: without its full stop, the default in brackets."""
    named = _DEFAULT.search(text)
    words = text[: named.start()] if named else text
    words = words.rstrip(".")
    if not words[1:2].isupper():
        words = words[0].lower() + words[1:]
    if named:
        words += f" (default: {named[1]})"
    elif "default" in settings and settings.get("action") != "store_true":
        default = shown(settings["default"])
        if default:
            words += f" (default: {default})"
        elif not positional:
            words += " (default: none)"
    return words.replace("%", "%%")


def shown(default: Any) -> str:
    """A default as the help shows it, several values with commas; empty for none."""
    if isinstance(default, (list, tuple)):
        return ",".join(map(str, default))
    if default is False:
        return "no"
    return "" if default is None else str(default)


def options_from(declared: Callable[..., T], args: argparse.Namespace) -> T:
    """The options object of a command's arguments, which are called as the fields."""
    return declared(**given_of(declared, args))


def given_of(declared: Callable[..., Any], args: argparse.Namespace) -> dict[str, Any]:
    """A command's arguments as the function of the options object takes them, by name."""
    given = vars(args)
    names = [name for name in inspect.signature(declared).parameters if name in given]
    return {name: given[name] for name in names}


def texts_of(declared: type[Any], *, whole: bool = False) -> dict[str, str]:
    """The text of each field, by name, from the docstrings of a dataclass and its bases.

    A command's help has its first paragraph; the ``whole`` text is for Python.
    """
    texts = dict[str, str]()
    for base in reversed(declared.__mro__):
        for name, text in _own_texts(base).items():
            paragraphs = text if whole else text.partition("\n\n")[0]
            texts[name] = " ".join(paragraphs.split())
    return texts


@cache
def _own_texts(base: Callable[..., Any]) -> dict[str, str]:
    """The text of each field in the docstring of a class alone."""
    section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.split(rf"^ {{{_INDENT}}}(\w+): ", section, flags=re.MULTILINE)
    return dict(zip(entries[1::2], entries[2::2], strict=True))


def takes(options: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Let a function of an options object take the object's fields as its parameters.

    Its signature and its docstring's ``Args`` are those of the fields, for ``help()`` and editors.
    A value that is none of its field's choices is refused, as the command refuses it.
    """

    def decorated(function: Callable[[T], R]) -> Callable[P, R]:
        signature = _signature(options, function)

        @wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            try:
                signature.bind(*args, **given)
            except TypeError as error:
                # Python names the options' class here, which no user knows.
                unknown = [name for name in given if name not in signature.parameters]
                hint = nearest(unknown[0], signature.parameters) if unknown else ""
                raise TypeError(f"{function.__name__}() {error}{hint}") from None
            asked = options(*args, **given)
            check_choices(asked)
            return function(asked)

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _docstring(options, inspect.cleandoc(function.__doc__ or ""))
        return call

    return decorated


def _signature(options: Any, function: Callable[..., Any]) -> inspect.Signature:
    parameters = [
        parameter.replace(annotation=_plain(str(parameter.annotation)))
        for parameter in inspect.signature(options).parameters.values()
    ]
    return inspect.Signature(parameters, return_annotation=function.__annotations__["return"])


def _plain(annotation: str) -> str:
    """An annotation without its `Option`."""
    return annotation.removeprefix("Annotated[").partition(", Option(")[0]


def _docstring(options: Any, text: str) -> str:
    """The docstring with ``Args``, before what it raises."""
    texts = texts_of(options, whole=True)
    entries = [f"    {name}: {texts[name]}" for name in inspect.signature(options).parameters]
    before, raises, after = text.partition("\n\nRaises:")
    return "\n".join([f"{before}\n\nArgs:", *entries]) + raises + after
