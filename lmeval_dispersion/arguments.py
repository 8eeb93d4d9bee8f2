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
from lmeval_dispersion.report.declared import listed

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_INDENT = 4  # of a docstring's section, and again of its entries
_DEFAULT = re.compile(r" Default: ([^.]*(?:\.\S[^.]*)*)\.$")


class Option(NamedTuple):
    """Properties of an option that do not follow from the type of its field.

    Attributes:
        metavar: The value's name in the help; None for a flag, or to show the choices.
        names: The option's names, such as ``("-o", "--output")``. Default: the field's name.
        action: The argparse action for the value; None to store it.
        type: Function that converts the option's text to the value; None to convert the text to
            the field's type.
        least: The smallest number allowed; None without a limit.
    """

    metavar: str | None = None
    names: tuple[str, ...] = ()
    action: type[argparse.Action] | None = None
    type: Callable[[str], Any] | None = None
    least: float | None = None


def add_options(
    parser: argparse._ActionsContainer,
    declared: type[Any],
    *names: str,
    dashed: bool = True,
    **more: Any,
) -> None:
    """Add an option to a parser for each field of a dataclass.

    A field before ``KW_ONLY`` whose `Option` gives no names becomes a positional argument instead.

    Args:
        parser: The parser, or one of its argument groups.
        declared: The dataclass.
        names: Names of the fields to add, in this order; fields of base classes can be named, too.
            Default: all fields that the dataclass itself declares.
        dashed: Replace underscores by dashes in the names of options. False keeps underscores, as
            in lm-eval's options.
        more: Arguments for each ``add_argument`` call, which replace those made from the field.
            ``help`` is written like an entry under ``Attributes``, with a full stop.
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
            words = name.replace("_", "-") if dashed else name
            flags = (f"--{words}",)
        settings = _settings(field, hints[name], option, positional=not flags)
        settings |= more
        text = more.get("help", texts[name])
        settings["help"] = _help(text, settings, positional=not flags)
        if flags:
            parser.add_argument(*flags, dest=name, **settings)
        else:
            parser.add_argument(name, **settings)


def check_values(asked: Any) -> None:
    """Check the fields of an options object that allow only certain values.

    Raises:
        UsageError: A value is not one of the choices of its field (a ``Literal``), or not a number of
            at least ``least`` (see `Option`); the error names the field.
    """
    hints = _hints(type(asked))
    for field in dataclasses.fields(asked):
        value = getattr(asked, field.name)
        if value is field.default:
            continue
        least = _option(hints[field.name]).least
        if least is not None:
            try:
                is_enough = bool(value >= least)  # not of NaN
            except TypeError:
                error = UsageError(f"expected a number, got {value!r}", argument=field.name)
                raise error from None
            if not is_enough:
                raise UsageError(f"expected at least {least}, got {value}", argument=field.name)
        choices = _choices(hints[field.name])
        if not choices:
            continue
        is_one = isinstance(value, str) or not isinstance(value, Iterable)
        values = [value] if is_one else value
        for each in values:
            if each not in choices:
                expected = listed(choices, "or")
                raise UsageError(f"expected {expected}, got {each!r}", argument=field.name)


def options_from(declared: Callable[..., T], args: argparse.Namespace) -> T:
    """Return an object of the class ``declared``, made from a command's parsed arguments.

    ``args`` may have further arguments, which are ignored.

    Raises:
        UsageError: A value is not allowed; see :func:`check_values`.
    """
    asked = declared(**given_of(declared, args))
    check_values(asked)
    return asked


def given_of(declared: Callable[..., Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the parsed arguments that are also parameters of ``declared``, by name."""
    given = {}
    for name in inspect.signature(declared).parameters:
        if name in args:
            given[name] = getattr(args, name)
    return given


def texts_of(declared: type[Any], *, whole: bool = False) -> dict[str, str]:
    """Return the text on each field, by name, from the docstrings of a dataclass and its bases.

    The text is the first paragraph of the field's entry under ``Attributes``, as the command's help
    shows it. With ``whole`` it is the entire entry, as Python's ``help()`` shows it.
    """
    texts = {}
    for base in reversed(declared.__mro__):
        for name, text in _own_texts(base).items():
            paragraphs = text if whole else text.partition("\n\n")[0]
            texts[name] = " ".join(paragraphs.split())
    return texts


def shown_default(default: Any) -> str:
    """Return a default value as the help shows it.

    None becomes "", False becomes "no", and the items of a list or tuple are joined by commas.
    """
    if default is None:
        return ""
    if default is False:
        return "no"
    if isinstance(default, (list, tuple)):
        return ",".join(map(str, default))
    return str(default)


def takes(options: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Decorate a function of one options object, so that it takes the object's fields instead.

    The new function's signature and the ``Args`` of its docstring are made from the fields, for
    ``help()`` and editors. A call with an unknown argument raises TypeError, and a call with a
    value that its field does not allow raises UsageError.

    Args:
        options: The dataclass of the options object.
    """

    def decorated(function: Callable[[T], R]) -> Callable[P, R]:
        signature = _signature(options, function)

        @wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            try:
                signature.bind(*args, **given)
            except TypeError as error:
                # Python names the options' class here, which no user knows.
                hint = ""
                for name in given:
                    if name not in signature.parameters:
                        hint = nearest(name, signature.parameters)
                        break
                raise TypeError(f"{function.__name__}() {error}{hint}") from None
            asked = options(*args, **given)
            check_values(asked)
            return function(asked)

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _docstring(options, inspect.cleandoc(function.__doc__ or ""))
        return call

    return decorated


# --- a field's type ---------------------------------------------------------------------------------


def _hints(declared: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    hints = {}
    for base in reversed(declared.__mro__):
        hints.update(_own_hints(base))
    return hints


@cache
def _own_hints(base: Callable[..., Any]) -> dict[str, Any]:
    """The types of the fields of a class alone; a name that type checkers alone import is Any."""
    unknown: dict[str, Any] = {}
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
    is_union = get_origin(hint) in (Union, UnionType)
    parts = get_args(hint) if is_union else (hint,)
    return [part for part in parts if part is not type(None)]


def _items(hint: Any) -> list[Any]:
    """The types of the items, where a hint allows several values."""
    items = []
    for kind in _types(hint):
        if get_origin(kind) in (Sequence, Iterable):
            items += _types(get_args(kind)[0])
    return items


def _choices(hint: Any) -> list[Any]:
    """The values that a field, or an item of it, may have; empty where any is allowed."""
    choices: list[Any] = []
    for kind in [*_types(hint), *_items(hint)]:
        if get_origin(kind) is Literal:
            choices += get_args(kind)
    return list(dict.fromkeys(choices))


def _numbers(text: str) -> tuple[int, ...]:
    """The value of a field of whole numbers, from its text."""
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers separated by commas, such as 16,64, got {text!r}"
        ) from None


# --- a field on the command line --------------------------------------------------------------------


def _settings(
    field: dataclasses.Field[Any], hint: Any, option: Option, *, positional: bool
) -> dict[str, Any]:
    """The arguments of ``add_argument`` that follow from a field, but for its names and help."""
    types = _types(hint)
    if types == [bool]:
        return {"action": "store_true", "default": False}
    items = _items(hint)
    choices = _choices(hint)
    is_required = field.default is dataclasses.MISSING
    settings: dict[str, Any] = {"metavar": option.metavar}
    if not is_required:
        settings["default"] = field.default
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


def _help(text: str, settings: dict[str, Any], *, positional: bool) -> str:
    """A field's text as argparse's help: without its full stop, the default in brackets."""
    named = _DEFAULT.search(text)
    words = text
    default = ""
    if named:
        words = text[: named.start()]
        default = named[1]
    elif "default" in settings and settings.get("action") != "store_true":
        default = shown_default(settings["default"])
        if not default and not positional:
            default = "none"
    words = words.rstrip(".")
    if not words[1:2].isupper():
        words = words[0].lower() + words[1:]
    if default:
        words += f" (default: {default})"
    return words.replace("%", "%%")


# --- a field in Python ------------------------------------------------------------------------------


@cache
def _own_texts(base: Callable[..., Any]) -> dict[str, str]:
    """The text of each field in the docstring of a class alone."""
    docstring = inspect.cleandoc(base.__doc__ or "")
    section = docstring.partition("Attributes:\n")[2]
    entries = re.split(rf"^ {{{_INDENT}}}(\w+): ", section, flags=re.MULTILINE)
    return dict(zip(entries[1::2], entries[2::2], strict=True))


def _signature(options: Any, function: Callable[..., Any]) -> inspect.Signature:
    parameters = []
    for parameter in inspect.signature(options).parameters.values():
        annotation = _plain(str(parameter.annotation))
        parameters.append(parameter.replace(annotation=annotation))
    return inspect.Signature(parameters, return_annotation=function.__annotations__["return"])


def _plain(annotation: str) -> str:
    """An annotation without its `Option`."""
    return annotation.removeprefix("Annotated[").partition(", Option(")[0]


def _docstring(options: Any, text: str) -> str:
    """The docstring with ``Args``, before what it raises."""
    texts = texts_of(options, whole=True)
    before, raises, after = text.partition("\n\nRaises:")
    lines = [f"{before}\n\nArgs:"]
    for name in inspect.signature(options).parameters:
        lines.append(f"    {name}: {texts[name]}")
    return "\n".join(lines) + raises + after
