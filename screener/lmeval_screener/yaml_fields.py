"""Reads the project's small YAML files; an error is one sentence: file, key, expected, given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.layouts import checked
from lmeval_screener.budgets import YAML, YAML_NODES

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")
_NONE: Mapping[str, str] = MappingProxyType({})


def bundled_yaml(path: Path) -> Any:
    """A bundled file's content, parsed by libyaml where PyYAML has it: ten times as fast.

    Not for users' files: deeply nested brackets crash libyaml and with it the process.
    """
    import yaml

    return yaml.load(
        path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )


def load_yaml(layout: type[T], path: Path, elsewhere: Mapping[str, str] = _NONE) -> T:
    """Read a YAML file as its `layout <lmeval_dispersion.layouts>`; UsageError for any other file.

    ``elsewhere`` maps another ``role`` to the end of the error for a file that has it, after ``PATH holds``.
    """
    import yaml

    try:
        is_ours = path.parent in (data_folder("token_sets"), Path(__file__).with_name("targets"))
        content = bundled_yaml(path) if is_ours else bounded_yaml(_start_of(path))
    except OSError as error:
        raise UsageError(
            f"{path}: expected a readable YAML file, got {error.strerror or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}"
        ) from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: expected YAML, got: {reason}; correct the file") from error
    role = content.get("role") if isinstance(content, dict) else None
    if isinstance(role, str) and role in elsewhere:
        raise UsageError(f"{path} holds {elsewhere[role]}")
    return checked(layout, content, path)


def _start_of(path: Path) -> bytes:
    """A file's bytes, or one more than are read."""
    with path.open("rb") as file:
        return file.read(YAML + 1)


def bounded_yaml(body: bytes) -> Any:
    """An untrusted YAML text's content.

    Raises:
        UnicodeDecodeError: It is not UTF-8.
        YAMLError: It is broken, too long, or too large once every alias is written out.
    """
    import yaml

    if len(body) > YAML:
        raise yaml.YAMLError(f"more than {YAML} bytes")
    text = body.decode("utf-8")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _values_in(node, {}) > YAML_NODES:
            raise yaml.YAMLError(f"more than {YAML_NODES} values, aliases written out")
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    except (
        Exception
    ) as error:  # PyYAML makes dates and numbers by functions that raise what they like
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def _values_in(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of values in a YAML node with its aliases written out; ``known`` are those of nodes before.

    A node inside itself counts as one there: it makes a value without an end, which no layout takes.
    """
    import yaml

    if id(node) in known:
        return known[id(node)]
    known[id(node)] = total = 1
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    else:
        parts = node.value if isinstance(node, yaml.SequenceNode) else []
    for part in parts:
        total += _values_in(part, known)
    known[id(node)] = total
    return total
