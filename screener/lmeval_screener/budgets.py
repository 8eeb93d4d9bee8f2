"""What an untrusted file may cost: bytes, objects, and the time of its checkpoint.

Each budget is four times the largest real file that we know, which its comment names. Larger ones are refused
before anything is built from them: a few bytes of a file become tens of bytes in memory, and a short program
(a pickle, a list of replacements) may ask for any number of them. What stays within the budgets, but takes
more than a moment, asks `check_time` in between, so that ``DISPERSION_TIMEOUT`` reaches it.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from lmeval_screener.errors import ScreeningError

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
    """The budget of a kind of JSON file: bytes, marks (``[``, ``{``, ``:`` and ``,``), objects and depth."""

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
    """A JSON text's value; ValueError with the reason if it is not JSON or costs more than its budget.

    ``hook`` makes an object from its pairs, as in `json.loads`.
    """
    if len(body) > budget.size:
        raise ValueError(f"it has {len(body)} bytes, more than {budget.size}")
    # Marks in strings count too: the budget has room for them.
    marks = sum(map(body.count, (b"[", b"{", b":", b",")))
    if marks > budget.marks:
        raise ValueError(f"it holds {marks} values and keys, more than {budget.marks}")
    objects = body.count(b"{")
    if objects > budget.objects:
        raise ValueError(f"it holds {objects} objects, more than {budget.objects}")
    check_time()
    try:
        value = json.loads(body.removeprefix(BOM_UTF8).decode(), object_pairs_hook=hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if body.count(b"[") + body.count(b"{") > budget.depth and _is_deeper(body, budget.depth):
        raise ValueError(f"it is nested more than {budget.depth} deep")
    check_time()
    return value


_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))


def _is_deeper(body: bytes, depth: int) -> bool:
    """Whether a valid JSON text is nested deeper."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_BRACKETS)
    left = b"".join(plain.split(b'"')[::2])  # the brackets outside strings
    for _ in range(depth):
        left = left.replace(b"[]", b"").replace(b"{}", b"")
        if not left:
            return False
    return True


# --- time ------------------------------------------------------------------------------------------------

_remaining: ContextVar[Callable[[], float]] = ContextVar("_remaining")


@contextmanager
def timed(remaining: Callable[[], float]) -> Iterator[None]:
    """Let `check_time` fail in this context as soon as no seconds remain."""
    token = _remaining.set(remaining)
    try:
        yield
    finally:
        _remaining.reset(token)


def check_time() -> None:
    """Raise ScreeningError (``Timeout``) if the time of the checkpoint that is read has run out."""
    remaining = _remaining.get(None)
    if remaining is not None and remaining() <= 0:
        raise ScreeningError(
            "Timeout",
            "its files take longer to understand than its time; set more in DISPERSION_TIMEOUT",
        )


def in_steps(values: Iterable[T], every: int = 4096) -> Iterator[T]:
    """The values, with `check_time` before each ``every``."""
    for number, value in enumerate(values):
        if number % every == 0:
            check_time()
        yield value
