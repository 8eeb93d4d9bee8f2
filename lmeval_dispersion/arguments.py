"""One declaration of an argument: a dataclass's field is an option and a function's parameter.

The field has the type, the choices and the default; the ``Attributes`` of the class's docstring are
the help of the command (the first paragraph of each) and the ``Args`` of the function. A field
``minutes: Annotated[int, Option("N")] = 5`` with the text "Time on the fire." is ``--minutes N``,
*time on the fire (default: 5)*, and ``minutes=5`` in Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from functools import wraps
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
    get_type_hints,
)

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_INDENT = 4  # of a docstring's section, and again of its entries
_DEFAULT = re.compile(r" Default: ([^.]*(?:\.\w[^.]*)*)\.$")


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
    """Add an option for each field that a dataclass declares itself.

    Args:
        parser: The parser, or a group of it.
        declared: The dataclass.
        names: Fields that are wanted alone.
        dashed: Whether options have dashes where fields have underscores, which lm-eval's keep.
        more: Further arguments of each ``add_argument``, such as ``required``.
    """
    hints = get_type_hints(declared, include_extras=True)
    texts = texts_of(declared)
    for field in dataclasses.fields(declared):
        if field.name in (names or declared.__annotations__):
            name = field.name.replace("_", "-") if dashed else field.name
            given = {"help": texts[field.name], **more}
            _add_option(parser, f"--{name}", field, hints[field.name], given)


def _add_option(
    parser: argparse._ActionsContainer,
    name: str,
    field: dataclasses.Field[Any],
    hint: Any,
    given: dict[str, Any],
) -> None:
    option = Option()
    for part in getattr(hint, "__metadata__", ()):
        if isinstance(part, Option):
            option = part
    types = _types(hint)
    given["dest"] = field.name
    given["help"] = _help(given["help"], field.default, types)
    choices = [choice for kind in types if get_origin(kind) is Literal for choice in get_args(kind)]
    if types == [bool]:
        given["action"] = "store_true"
    elif get_origin(types[0]) is Sequence:
        given["action"] = "append"
        given["default"] = []
        given["metavar"] = option.metavar
    else:
        given["default"] = field.default
        given["metavar"] = option.metavar
        if option.action:
            given["action"] = option.action
        if choices:
            given["choices"] = choices
        if option.type:
            given["type"] = option.type
        elif types[0] in (int, float, Path) and str not in types:
            given["type"] = types[0]
    if bool in types and len(types) > 1:  # an option that may be given without its value
        given["nargs"] = "?"
        given["const"] = True
    parser.add_argument(*(option.names or (name,)), **given)


def _types(hint: Any) -> list[Any]:
    """The types that a hint allows, without None."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [part for part in parts if part is not type(None)]


def _help(text: str, default: Any, types: list[Any]) -> str:
    """A field's text as argparse's help: without its full stop, the default in brackets."""
    named = _DEFAULT.search(text)
    words = text[: named.start()] if named else text
    words = words.rstrip(".")
    if not words[1:2].isupper():
        words = words[0].lower() + words[1:]
    if named:
        words += f" (default: {named[1]})"
    elif types != [bool]:
        words += f" (default: {'none' if default in (None, '', ()) else default})"
    return words.replace("%", "%%")


def options_from(declared: Callable[..., T], args: argparse.Namespace) -> T:
    """The options object of a command's arguments, which are called as the fields."""
    given = vars(args)
    names = [name for name in inspect.signature(declared).parameters if name in given]
    return declared(**{name: given[name] for name in names})


def texts_of(declared: type[Any], *, whole: bool = False) -> dict[str, str]:
    """The text of each field, by name, from the docstrings of a dataclass and its bases.

    A command's help has its first paragraph; the ``whole`` text is for Python.
    """
    texts = dict[str, str]()
    for base in reversed(declared.__mro__):
        section = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")[2]
        entries = re.split(rf"^ {{{_INDENT}}}(\w+): ", section, flags=re.MULTILINE)
        for name, text in zip(entries[1::2], entries[2::2], strict=True):
            shown = text if whole else text.partition("\n\n")[0]
            texts[name] = " ".join(shown.split())
    return texts


def takes(options: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Let a function of an options object take the object's fields as its parameters.

    Its signature and its docstring's ``Args`` are those of the fields, for ``help()`` and editors.
    """

    def decorated(function: Callable[[T], R]) -> Callable[P, R]:
        signature = _signature(options, function)

        @wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            try:
                signature.bind(*args, **given)
            except TypeError as error:
                # Python names the options' class here, which no user knows.
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(options(*args, **given))

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
