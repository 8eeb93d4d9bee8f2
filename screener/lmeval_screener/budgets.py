"""What an untrusted file may cost: bytes, objects, and the time of its checkpoint.

Each budget is four times the largest real file that we know, which its comment names. Larger ones are refused
before anything is built from them: a few bytes of a file become tens of bytes in memory, and a short program
(a pickle, a list of replacements) may ask for any number of them. What stays within the budgets, but takes
more than a moment, asks `check_time` in between, so that ``DISPERSION_TIMEOUT`` reaches it.

Small files are read within them: JSON by `parsed`, YAML by `load_yaml` and `bounded_yaml`.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.layouts import checked
from lmeval_screener.errors import ScreeningError

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")

MIB = 2**20
#: Times the largest real one.
MARGIN = 4

#: Dimensions of a tensor: patch embeddings of images and films have 5.
DIMENSIONS = MARGIN * 5
#: Characters of a tensor's name: with the prefixes of compiled, sharded and adapted models some 250.
NAME = MARGIN * 256
#: Numbers in a shape and in strides; no file is as long.
NUMBER = 2**48

#: Bytes of a pickle: 1 MiB names 7,800 tensors, more than any published shard that we know.
PICKLE = MARGIN * MIB
#: Its steps: torch writes 32 for each tensor.
PICKLE_STEPS = MARGIN * 7_800 * 32
#: Elements that its calls are given, or copy: 15 for each tensor.
PICKLE_COPIED = MARGIN * 7_800 * 15
#: Bytes of a zip archive's directory: 90 for each of as many tensors' storages.
ZIP_DIRECTORY = MARGIN * MIB

#: Bytes of a GGUF header: Gemma 3's 262,144 tokens and 514,906 merges as strings have some 16 MB.
GGUF_HEADER = MARGIN * 16 * MIB
#: Strings and values in its arrays: those tokens with scores and types, and those merges.
GGUF_ELEMENTS = MARGIN * (3 * 262_144 + 514_906)
#: Its pairs of key and value: Kimi-K2 has 54.
GGUF_PAIRS = MARGIN * 256
#: Its tensors: Kimi-K2 has 1,157; before experts were stacked, Mixtral had 995.
GGUF_TENSORS = MARGIN * 2_048

#: Tokens that a tokenizer adds: Llasa adds 65,536 for sounds.
ADDED_TOKENS = MARGIN * 65_536
#: Components of a tokenizer: normaliser, pre-tokenizer and decoder have up to 16 together, and some replace
#: signs one by one.
TOKENIZER_PARTS = MARGIN * 64
#: Characters of a word after the normaliser, and of a replacement.
NORMALISED = MARGIN * 256

#: Bytes of a YAML file of words, answers or families: the longest bundled one has 13 kB, and a task with ten
#: thousand different answers 250.
YAML = MARGIN * 250_000
#: Its nodes, each as often as aliases repeat it.
YAML_NODES = MARGIN * 20_000

#: Pages of a listing, of a thousand models each: the largest author has some hundred thousand.
PAGES = MARGIN * 128


class Json(NamedTuple):
    """The limits for one kind of JSON file.

    Attributes:
        size: Largest size of the text in bytes.
        marks: Largest number of the characters ``[``, ``{``, ``:`` and ``,``, all together.
        objects: Largest number of objects, counted as ``{``.
        depth: How deeply arrays and objects may be nested.
    """

    size: int
    marks: int
    objects: int
    depth: int


#: A safetensors header. PEFT's adapter of all linear layers of DeepSeek-V3 has 90,000 tensors: 14 MB, 12
#: marks each. Shards have some thousands: 5,400 of Kimi-K3, 20,000 in a GPTQ of Qwen3-30B-A3B.
HEADER = Json(MARGIN * 14 * MIB, MARGIN * 90_000 * 12, MARGIN * 90_000 * 2, MARGIN * 3)
#: config.json: most have 2 kB; lists of modules that stay unquantised have thousands of names.
CONFIG = Json(MARGIN * 2 * MIB, MARGIN * 40_000, MARGIN * 5_000, MARGIN * 12)
#: An index of shards: Kimi-K3's names 92 × 896 × 3 matrices and as many scales, in some 54 MB.
#: Its size is that of any small file.
INDEX = Json(MARGIN * 16 * MIB, MARGIN * 2 * 500_000, MARGIN * 1_000, MARGIN * 3)
#: tokenizer.json: Gemma 3's, 33 MB, lists 262,144 pieces and 514,906 pairs of merges.
TOKENIZER = Json(
    MARGIN * 16 * MIB, MARGIN * (2 * 262_144 + 3 * 514_906 + 100_000), 2 * ADDED_TOKENS, MARGIN * 12
)


def parsed(
    body: bytes,
    budget: Json,
    *,
    hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parse JSON text within a budget and return its value.

    Args:
        body: The text in UTF-8.
        budget: The limits.
        hook: Builds each object from its (key, value) pairs, like ``object_pairs_hook`` of
            `json.loads`.

    Raises:
        ValueError: The text is not valid JSON, or exceeds one of the limits.
        ScreeningError: The time for the checkpoint has run out (``Timeout``).
    """
    if len(body) > budget.size:
        raise ValueError(f"the text has {len(body)} bytes, more than the limit of {budget.size}")
    # Marks in strings count too: the budget has room for them.
    marks = sum(map(body.count, (b"[", b"{", b":", b",")))
    if marks > budget.marks:
        raise ValueError(
            f"the text has {marks} brackets, colons and commas, more than the limit of "
            f"{budget.marks}"
        )
    objects = body.count(b"{")
    if objects > budget.objects:
        raise ValueError(f"the text has {objects} objects, more than the limit of {budget.objects}")
    check_time()
    try:
        value = json.loads(body.removeprefix(BOM_UTF8).decode(), object_pairs_hook=hook)
    except RecursionError as error:
        raise ValueError("the text is nested too deeply") from error
    if body.count(b"[") + body.count(b"{") > budget.depth and _is_deeper(body, budget.depth):
        raise ValueError(f"the text is nested more than {budget.depth} levels deep")
    check_time()
    return value


_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))


def _is_deeper(body: bytes, depth: int) -> bool:
    """Whether a valid JSON text is nested more than ``depth`` levels deep."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_BRACKETS)
    left = b"".join(plain.split(b'"')[::2])  # the brackets outside strings
    for _ in range(depth):
        left = left.replace(b"[]", b"").replace(b"{}", b"")
        if not left:
            return False
    return True


# --- YAML -----------------------------------------------------------------------------------------

_NONE: Mapping[str, str] = MappingProxyType({})


def bundled_yaml(path: Path) -> Any:
    """Read a YAML file of this package and return its content.

    Uses libyaml if PyYAML was built with it, which is ten times as fast. Not for users' files:
    deeply nested brackets crash libyaml, and the process with it.
    """
    import yaml

    return yaml.load(
        path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )


def load_yaml(layout: type[T], path: Path, elsewhere: Mapping[str, str] = _NONE) -> T:
    """Read a YAML file, check it against a layout, and return its content.

    Args:
        layout: The type of the expected content; see `lmeval_dispersion.layouts`.
        path: The file, bundled or a user's.
        elsewhere: Files of other kinds, which are refused: the value of their key ``role`` -> what
            such a file holds, as the end of the error ``PATH holds …``.

    Raises:
        UsageError: The file cannot be read, is not YAML in UTF-8, has a ``role`` in ``elsewhere``,
            or does not have the layout.
    """
    import yaml

    try:
        folders = (data_folder("token_sets"), Path(__file__).with_name("targets"))
        is_ours = any(folder in path.parents for folder in folders)
        content = bundled_yaml(path) if is_ours else bounded_yaml(_start_of(path))
    except OSError as error:
        raise UsageError(
            f"{path}: expected a readable YAML file ({error.strerror or error}); check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: expected UTF-8 text, got the byte {error.object[error.start]:#04x}; save the "
            "file as UTF-8"
        ) from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: expected valid YAML ({reason}); correct the file") from error
    role = content.get("role") if isinstance(content, dict) else None
    if isinstance(role, str) and role in elsewhere:
        raise UsageError(f"{path} holds {elsewhere[role]}")
    return checked(layout, content, path)


def _start_of(path: Path) -> bytes:
    """Read a file, at most one byte more than the limit `YAML`."""
    with path.open("rb") as file:
        return file.read(YAML + 1)


def bounded_yaml(body: bytes) -> Any:
    """Parse YAML text from an untrusted file and return its content; None for an empty text.

    Raises:
        UnicodeDecodeError: The text is not UTF-8.
        YAMLError: The text is not valid YAML, has more than `YAML` bytes, or has more than
            `YAML_NODES` values once its aliases are expanded.
    """
    import yaml

    if len(body) > YAML:
        raise yaml.YAMLError(f"the text has more bytes than the limit of {YAML:,}")
    text = body.decode("utf-8")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _values_in(node, {}) > YAML_NODES:
            raise yaml.YAMLError(
                f"the text has more values than the limit of {YAML_NODES:,}, once its aliases are "
                "expanded"
            )
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    except Exception as error:
        # PyYAML makes dates and numbers by functions that raise what they like.
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def _values_in(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values in a YAML node, with its aliases expanded.

    ``known`` maps the ids of nodes that were counted before to their counts. A node inside itself
    counts as one there: it makes a value without an end, which no layout takes.
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


# --- time ------------------------------------------------------------------------------------------------

_remaining: ContextVar[Callable[[], float]] = ContextVar("_remaining")


@contextmanager
def timed(remaining: Callable[[], float]) -> Iterator[None]:
    """Make `check_time` raise within this context once time has run out.

    Args:
        remaining: Returns the seconds that remain; zero or less once time has run out.
    """
    token = _remaining.set(remaining)
    try:
        yield
    finally:
        _remaining.reset(token)


def check_time() -> None:
    """Raise ScreeningError (``Timeout``) if the time for the checkpoint being read has run out.

    Outside of `timed` there is no limit.
    """
    remaining = _remaining.get(None)
    if remaining is not None and remaining() <= 0:
        raise ScreeningError(
            "Timeout",
            "the time limit for one checkpoint ran out while its files were being parsed; set "
            "DISPERSION_TIMEOUT to a larger number of seconds",
        )


def in_steps(values: Iterable[T], every: int = 4096) -> Iterator[T]:
    """Yield the values; call `check_time` before the first, then once for every ``every`` values.

    Raises:
        ScreeningError: The time for the checkpoint has run out (``Timeout``).
    """
    for number, value in enumerate(values):
        if number % every == 0:
            check_time()
        yield value
