"""Reading of the project's small YAML files; a mistake is one sentence: file, key, expected, given."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lmeval_dispersion.errors import UsageError

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


def mistake(source: object, key: str, expected: str, given: object, step: str = "") -> UsageError:
    """The error that says that a key of a file should hold something else."""
    place = f"`{key}`: " if key else ""
    end = f"; {step}" if step else ""
    return UsageError(f"{source}: {place}expected {expected}, got {_described(given)}{end}")


def load_yaml(layout: type[T], path: Path, schema: int = 1) -> T:
    """A YAML file as the dataclass that describes its layout.

    Fields may be ``str`` (not empty), ``bool``, ``Annotated[int, low]``, ``Literal``, ``tuple[str, ...]``
    (different strings, at least one), ``tuple`` or ``dict`` of dataclasses, and ``Any``; those with a default
    may be left out.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader that refuses a key that is given twice, where PyYAML keeps the last one."""

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        for position, key in enumerate(keys):
            if isinstance(key, (list, dict)) or key in keys[:position]:
                line = node.value[position][0].start_mark.line + 1
                raise UsageError(f"{path}: line {line}: expected each key once, got {key!r} again")
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except OSError as error:
        raise UsageError(f"{path}: expected a readable YAML file, got {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path}: expected YAML, got: {' '.join(str(error).split())}") from error
    reader = _Reader(path)
    version = reader.value(Annotated[int, 1], reader.mapping(content, "").get("schema"), "schema")
    if version != schema:
        raise UsageError(
            f"{path}: `schema`: expected {schema}, got {version}; update the file or the program"
        )
    file: T = reader.value(layout, content, "")
    return file


class _Reader:
    """Values of one file as their annotations describe them; ``where`` is a path of keys."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def value(self, kind: Any, value: Any, where: str) -> Any:
        origin, arguments = get_origin(kind), get_args(kind)
        if dataclasses.is_dataclass(kind):
            return self._fields(kind, value, where)
        if origin is dict:
            items = self.mapping(value, where).items()
            return {key: self.value(arguments[1], item, f"{where}.{key}") for key, item in items}
        if origin is tuple:
            return self._tuple(arguments[0], value, where)
        expected, step = "", ""
        if origin is Literal and (not isinstance(value, str) or value not in arguments):
            expected = f"one of {', '.join(arguments)}"
        elif origin is Annotated and (type(value) is not int or value < arguments[1]):
            expected = f"an integer of at least {arguments[1]}"
        elif kind is bool and not isinstance(value, bool):
            expected = "true or false"
        elif kind is str and (not isinstance(value, str) or not value.strip()):
            expected, step = "a string", "quote it" if isinstance(value, bool | int | float) else ""
        if expected:
            raise mistake(self._source, where, expected, value, step)
        return value

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise mistake(self._source, where, "a mapping", value)
        for key in value:
            if not isinstance(key, str):
                place = _inside(where, str(key))
                raise mistake(self._source, place, "a key that is a string", key, "quote it")
        return value

    def _fields(self, layout: Any, value: Any, where: str) -> Any:
        given, kinds = self.mapping(value, where), get_type_hints(layout, include_extras=True)
        fields = {field.name: field for field in dataclasses.fields(layout)}
        for key in given:
            if key not in fields:
                raise UsageError(
                    f"{self._source}: `{_inside(where, key)}`: expected one of the keys {', '.join(fields)}"
                    f"{nearest(key, fields)}"
                )
        return layout(
            **{
                name: self.value(kinds[name], given.get(name), _inside(where, name))
                for name, field in fields.items()
                if name in given or field.default is dataclasses.MISSING
            }
        )

    def _tuple(self, kind: Any, value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not value:
            raise mistake(self._source, where, f"a list of {'strings' if kind is str else 'mappings'}", value)
        for position, item in enumerate(value):
            place = f"{where}[{position}]"
            if kind is str and (not isinstance(item, str) or not item):
                step = "quote it (YAML reads bare no, on, null, 7 as other things)"
                raise mistake(self._source, place, "a string", item, "" if item == "" else step)
            if kind is str and item in value[:position]:
                raise mistake(self._source, place, "each item once", item, "remove the second one")
        return tuple(self.value(kind, item, f"{where}[{at}]") for at, item in enumerate(value))


def _inside(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _described(value: object) -> str:
    """A value as an error message shows it: its YAML kind and a short form."""
    kind = _NAMES.get(type(value), type(value).__name__)
    shown = repr(value)
    return kind if value is None else f"{kind} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def nearest(name: str, names: Collection[str]) -> str:
    """``"; did you mean …?"`` with up to three near names, or nothing.

    >>> nearest("maths", ["math", "code"])
    '; did you mean math?'
    """
    import difflib

    near = difflib.get_close_matches(name.lower(), list(names), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""
