"""Reading of the project's small YAML files; a mistake is one sentence: file, key, expected, given."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import UsageError

_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
    type(None): "nothing",
}


def described(value: object) -> str:
    """A value as an error message shows it: its YAML kind and a short form."""
    kind = _NAMES.get(type(value), type(value).__name__)
    if value is None:
        return kind
    shown = repr(value)
    return f"{kind} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def load_yaml(path: Path, schema: int = 1) -> Fields:
    """The top mapping of a YAML file whose ``schema`` is ``schema``.

    Args:
        path: The file.
        schema: The version of the layout that the caller reads.

    Raises:
        UsageError: The file is missing, unreadable or no YAML, has a key twice, is no mapping, or is of
            another schema.
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
    fields = Fields(str(path), "", content)
    version = fields.integer("schema", low=1)
    if version != schema:
        raise UsageError(
            f"{path}: `schema`: expected {schema}, got {version}; update the file or the program"
        )
    return fields


class Fields:
    """One mapping inside a YAML file; every reader checks the value's kind.

    Args:
        source: The file's name, for messages.
        where: Path of keys from the file's top to this mapping; empty at the top.
        value: What the file holds there.
    """

    def __init__(self, source: str, where: str, value: object) -> None:
        self.source = source
        self.where = where
        if not isinstance(value, dict):
            place = f"`{where}`: " if where else ""
            raise UsageError(f"{source}: {place}expected a mapping, got {described(value)}")
        self._values: dict[object, object] = value
        for key in value:
            if not isinstance(key, str):
                raise self.error(str(key), "a key that is a string", key, "quote it")

    def error(self, key: str, expected: str, given: object, step: str = "") -> UsageError:
        """The error that says that ``key`` should hold ``expected`` and holds ``given``."""
        end = f"; {step}" if step else ""
        return UsageError(
            f"{self.source}: `{self._place(key)}`: expected {expected}, got {described(given)}{end}"
        )

    def only(self, known: Collection[str]) -> None:
        """Refuse keys outside ``known``.

        Raises:
            UsageError: A key is unknown; the nearest known one is suggested.
        """
        for key in self:
            if key not in known:
                raise UsageError(
                    f"{self.source}: `{self._place(key)}`: expected one of the keys {', '.join(known)}"
                    f"{nearest(key, known)}"
                )

    def __iter__(self) -> Iterator[str]:
        """The keys in the file's order."""
        return (str(key) for key in self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        """A string that is not empty."""
        value = self._values.get(key, default)
        if not isinstance(value, str) or not value.strip():
            step = "quote it" if isinstance(value, (bool, int, float)) else ""
            raise self.error(key, "a string", value, step)
        return value

    def choice(self, key: str, choices: Collection[str], default: str | None = None) -> str:
        """One of ``choices``."""
        value = self._values.get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, f"one of {', '.join(choices)}", value)
        return value

    def flag(self, key: str) -> bool:
        """True or false; false when the key is absent."""
        value = self._values.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def integer(self, key: str, low: int) -> int:
        """An integer, at least ``low``."""
        value = self._values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.error(key, f"an integer of at least {low}", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of different strings, at least one."""
        value = self._values.get(key)
        if not isinstance(value, list) or not value:
            raise self.error(key, "a list of strings", value)
        for position, item in enumerate(value):
            if not isinstance(item, str) or not item:
                step = "quote it (YAML reads bare no, on, null, 7 as other things)"
                raise self.error(
                    f"{key}[{position}]", "a string", item, "" if isinstance(item, str) else step
                )
            if item in value[:position]:
                raise self.error(f"{key}[{position}]", "each item once", item, "remove the second one")
        return tuple(value)

    def mapping(self, key: str) -> Fields:
        """A mapping below this one."""
        return Fields(self.source, self._place(key), self._values.get(key))

    def mappings(self, key: str) -> list[Fields]:
        """A list of mappings, at least one."""
        value = self._values.get(key)
        if not isinstance(value, list) or not value:
            raise self.error(key, "a list of mappings", value)
        return [
            Fields(self.source, f"{self._place(key)}[{position}]", item)
            for position, item in enumerate(value)
        ]

    def _place(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key


def nearest(name: str, names: Collection[str]) -> str:
    """``"; did you mean …?"`` with up to three near names, or nothing.

    >>> nearest("maths", ["math", "code"])
    '; did you mean math?'
    """
    import difflib

    near = difflib.get_close_matches(name.lower(), list(names), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""
