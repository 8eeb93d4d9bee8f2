"""Copies among checkpoints, as far as the rows that were read can show.

A copy predicts the same. Its rows are equal, or were changed in a way that no softmax sees: by
rounding, a common vector, a scale between the final norm's weight γ and the rows, or a rotation. A
checkpoint trained without its output layer, as with LoRA or a merge, has equal rows too: only equal
bodies make a copy (`lmeval_screener.weights.body`).

A sketch of a few hundred bytes decides. If one checkpoint's numbers are the other's, rounded, their
hashes agree; siblings a single training step apart have different hashes. If the numbers themselves
differ, the Gram matrices of the centred rows, as they act on the normed state, are compared. They
must agree within the rounding of both types, and a training step must not explain the different
numbers: they are farther apart than any step that leaves the Gram matrix so near, or one of the
types is coarse. The rows of an adapter were added up here, those of its merged model elsewhere in
another order: their numbers need only agree within rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from posixpath import basename
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import count
from lmeval_dispersion.geometry import Array
from lmeval_dispersion.report.declared import some
from lmeval_screener.figures import relative_error, storage_error
from lmeval_screener.formats import ADAPTERS
from lmeval_screener.weights.body import UNKNOWN, Bodies, Likeness, keys, kind, likeness, tensors_in
from lmeval_screener.weights.tensors import PLAIN_DTYPES

if TYPE_CHECKING:
    from lmeval_screener.screened import Reading, Screened
    from lmeval_screener.weights.projection import FinalNorm

_MARK = 8  # bytes of a hash
_SIDES = 12  # random sums of rows, whose products are the sketch of the Gram matrix
_RAW = 8  # random sums of all numbers as stored
_PAIRS = np.triu_indices(_SIDES, 1)  # no squares: noise adds to them
_WITHIN = 1.5  # most times the expected rounding between equal Gram matrices; measured: 0.6 to 1.3
_FAR = 20.0  # multiple of the expected rounding above which stored numbers are different, not only moved
_FLOAT32 = 3e-7  # share by which arithmetic and the sketch's own float32 may move it
_BLOCK = 256  # readings for which distances are computed at once
_SHOWN = 5  # originals that a sentence names


def sketch(rows: NDArray[Any], norm: FinalNorm, dtype: str) -> bytes:
    """Summarise a checkpoint's rows in a few hundred bytes, so that copies can be recognised.

    The sketch begins with hashes of the rows and of the norm's weight γ, each as it is and rounded
    to F16 and BF16. Then float32 numbers follow: sums of all stored numbers with random signs, and
    products ``v_j K v_k`` for pairs of random vectors, where K is the Gram matrix of the centred
    rows times γ. After each of these two groups comes the rounding error to expect in it.

    Args:
        rows: Rows of the output projection, shape (n, d).
        norm: The final norm in front of the output projection.
        dtype: The type in which the rows are stored, such as ``BF16``.

    Returns:
        The sketch; empty if the weight of the norm is not known.
    """
    if norm.weight is None:
        return b""
    stored, (n, d) = rows.astype(np.float64), rows.shape
    error = np.square(storage_error(rows, dtype))
    raw = (_signs(_RAW, n) @ stored * _signs(_RAW, d)).sum(axis=1)
    signs = _signs(_SIDES, n)
    sums = norm.effective((signs - signs.mean(axis=1, keepdims=True)) @ stored)
    noise: Array = error.sum(axis=0) * np.square(norm.weight)
    of_gamma = 2 * min(relative_error(dtype), relative_error("BF16"))  # γ itself is never quantised
    first, second = (np.square(sums)[side] for side in _PAIRS)
    variance = (
        (first + second) @ noise
        + (first * second).sum(axis=1) * of_gamma**2
        + np.square(noise).sum()
    )
    numbers = [*raw, math.sqrt(error.sum()), *(sums @ sums.T)[_PAIRS], np.sqrt(variance.mean())]
    kind = str(norm.kind).encode()
    return (
        _marks(rows, b"") + _marks(norm.weight, kind) + np.asarray(numbers, dtype="<f4").tobytes()
    )


def are_sketch(content: bytes) -> bool:
    """Whether bytes have the length of a `sketch`, or are empty."""
    return len(content) in (0, 6 * _MARK + 4 * (_RAW + 1 + len(_PAIRS[0]) + 1))


@cache
def _signs(count: int, length: int) -> Array:
    """Random ±1, the same in every version: bits of a hash."""
    size = count * length
    bits = hashlib.shake_128(b"%d %d" % (count, length)).digest(size // 8 + 1)
    signs = np.unpackbits(np.frombuffer(bits, np.uint8), count=size).astype(np.float64) * 2 - 1
    return signs.reshape(count, length)


def _marks(numbers: NDArray[Any], kind: bytes) -> bytes:
    """Hashes of some numbers as float32, as F16 and as BF16 would keep them."""
    exact = np.ascontiguousarray(numbers, dtype="<f4")
    with np.errstate(over="ignore"):
        half = exact.astype("<f2").astype("<f4")
    bits = exact.view("<u4")
    short = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    kept = (exact, half, short.view("<f4"))
    # 0 and -0 are the same number.
    return b"".join(
        hashlib.blake2b((x + 0).tobytes() + kind, digest_size=_MARK).digest() for x in kept
    )


def _keys(sketch: bytes) -> list[bytes]:
    """The hash of rows with that of γ: of the numbers as they are, then of all roundings."""
    marks = [sketch[at * _MARK : (at + 1) * _MARK] for at in range(6)]
    return [rows + weight for rows in marks[:3] for weight in marks[3:]]


class Original(NamedTuple):
    """For one checkpoint: which checkpoint has the same rows, and of which one it is a copy.

    The rows are those of the output projection. Each checkpoint is given by its index in the
    sequence that was passed to `originals`.

    Attributes:
        place: Of all checkpoints with the same rows, the one whose dtype rounds least. It is the
            checkpoint itself if no other has its rows, or if its own dtype rounds least.
        exact: Whether the rows of this checkpoint and of ``place`` are the same numbers up to
            rounding; False if only their Gram matrices agree.
        copied: The checkpoint of which this one is a copy, with the same rows and the same body
            (the tensors before the final norm); None if this one is not a copy.
        bodies: Comparison of this checkpoint's body with the body of ``copied``, or of ``place`` if
            this one is not a copy; `UNKNOWN` if ``place`` is the checkpoint itself.
    """

    place: int
    exact: bool = True
    copied: int | None = None
    bodies: Likeness = UNKNOWN


def originals(members: Sequence[Reading]) -> list[Original]:
    """Find the copies and the equal rows among checkpoints that were read for the same tokens.

    If the rows of two checkpoints agree only in their Gram matrices (see `Original`), and their
    bodies (the tensors before the final norm) differ, the two count as separate trainings with
    different rows.

    Returns:
        An `Original` for each checkpoint, in the order of ``members``.
    """
    result = _by_rows(members)
    classes: dict[int, _Distinct] = {}
    for at in sorted(range(len(result)), key=lambda at: (result[at].place != at, at)):
        of, body = result[at], members[at].body
        distinct = classes.setdefault(of.place, _Distinct())
        if (copied := distinct.same(body)) is not None:
            result[at] = of._replace(copied=copied, bodies=likeness(members[copied].body, body))
            continue
        if of.place != at:
            bodies = likeness(members[of.place].body, body)
            is_other = bodies.is_same is False and not of.exact
            result[at] = Original(at) if is_other else of._replace(bodies=bodies)
        distinct.add(at, body)
    return result


class _Distinct:
    """The different bodies of readings with the same rows, by their places.

    Two with the same tensors in the same types are the same only bit for bit: thousands of adapters
    are not compared in pairs. With those of another kind a body is compared at once.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}
        self._kinds: dict[bytes, Bodies] = {}

    def same(self, body: bytes) -> int | None:
        """The place of the reading with the same body; None without one."""
        for key in keys(body):
            if key in self._known:
                return self._known[key]
        own = kind(body)
        if not own:
            return None
        for name, bodies in self._kinds.items():
            if name == own:
                continue
            place = bodies.same(body)
            if place is not None:
                return place
        return None

    def add(self, place: int, body: bytes) -> None:
        self._known |= dict.fromkeys(keys(body), place)
        own = kind(body)
        if own:
            self._kinds.setdefault(own, Bodies(tensors_in(body))).add(place, body)


def _by_rows(members: Sequence[Reading]) -> list[Original]:
    """Each reading's original by its rows.

    It is the reading whose type rounds least, or the first of equals. A reading as near to two
    different originals has the rows of neither. Hashes decide first; the rest is compared with its
    neighbours alone.
    """
    result = list(range(len(members)))
    order = sorted(
        (place for place, member in enumerate(members) if member.sketch),
        key=lambda place: (
            members[place].dtype not in PLAIN_DTYPES,
            relative_error(members[place].dtype),
        ),
    )
    exact: dict[bytes, int] = {}
    rounded: dict[bytes, int] = {}
    for place in order:
        keys = _keys(members[place].sketch)
        same = next((exact[key] for key in keys if key in exact), rounded.get(keys[0], place))
        result[place] = same
        exact.setdefault(keys[0], same)
        for key in keys:
            rounded.setdefault(key, same)
    distinct = [place for place in order if result[place] == place]
    merged = _merged([members[place] for place in distinct])
    of = {place: distinct[at] for place, at in zip(distinct, merged, strict=True)}
    return [Original(of.get(place, place), of.get(place, place) == place) for place in result]


def _merged(members: Sequence[Reading]) -> NDArray[np.intp]:
    """Originals by Gram matrix and types alone, of readings with different numbers, finest types first."""
    merged: NDArray[np.intp] = np.arange(len(members))
    if len(members) < 2:
        return merged
    numbers = np.stack([np.frombuffer(m.sketch[6 * _MARK :], "<f4") for m in members]).astype(
        np.float64
    )
    raw, raw_error, gram, error = np.split(numbers, [_RAW, _RAW + 1, len(numbers[0]) - 1], axis=1)
    length = np.linalg.norm(gram, axis=1)
    reach = math.sqrt(len(gram[0])) * _WITHIN * error[:, 0] + _FLOAT32 * length
    # In the order in which the intervals of the lengths begin: two whose intervals are apart are not alike.
    order = np.argsort(length - reach, kind="stable")
    ends = np.searchsorted((length - reach)[order], (length + reach)[order], side="right")
    raw, gram = raw[order], (gram - gram.mean(axis=0))[order]
    rounding = np.square(_WITHIN * raw_error[order, 0])
    close = _RAW * rounding + np.square(_FLOAT32) * np.square(raw).sum(axis=1)
    far, near = _RAW * np.square(_FAR * raw_error[order, 0]), np.square(reach[order])
    types = np.array([members[place].dtype for place in order])
    coarse = ~np.isin(types, PLAIN_DTYPES)
    computed = np.array([basename(members[place].file) in ADAPTERS for place in order])
    alike: list[NDArray[np.intp]] = []
    for begin in range(0, len(members), _BLOCK):
        a, b = slice(begin, begin + _BLOCK), slice(begin, ends[begin : begin + _BLOCK].max())
        possible = (coarse[a, None] | coarse[b]) & (types[a, None] != types[b])
        apart = _apart(raw[a], raw[b])
        possible |= apart > far[a, None] + far[b]
        possible |= (computed[a, None] != computed[b]) & (apart <= close[a, None] + close[b])
        possible &= _apart(gram[a], gram[b]) <= near[a, None] + near[b]
        pairs = order[np.stack(np.nonzero(np.triu(possible, 1))) + begin]
        alike.append(np.sort(pairs, axis=0))
    fine, other = np.concatenate(alike, axis=1)
    places, begins = np.unique(np.sort(other), return_index=True)
    equals_of = np.split(fine[np.argsort(other, kind="stable")], begins[1:])
    for at, equals in zip(places.tolist(), equals_of, strict=bool(len(places))):
        nearest = np.unique(merged[equals])
        if len(nearest) == 1 and nearest[0] in equals:
            merged[at] = nearest[0]
    plain = np.empty(len(members), dtype=bool)
    plain[order] = ~coarse
    both = plain[fine] & plain[other]
    _separate(merged, fine[both], other[both], plain)
    return merged


def _separate(
    merged: NDArray[np.intp],
    fine: NDArray[np.intp],
    other: NDArray[np.intp],
    plain: NDArray[np.bool_],
) -> None:
    """Undo copies of plain types that are alike to two different readings, given all alike pairs."""
    count, inside = len(merged), merged[fine] == merged[other]
    alike = np.bincount(np.concatenate([fine[inside], other[inside]]), minlength=count)
    size = np.bincount(merged[plain], minlength=count)[merged]
    apart = plain & (alike < size - 1)
    merged[apart] = np.nonzero(apart)[0]
    between = merged[fine] != merged[other]
    for side in (fine[between], other[between]):
        merged[side] = side


def _apart(a: Array, b: Array) -> Array:
    """Squared distances between the vectors of two sets."""
    squares: Array = np.square(a).sum(axis=1)[:, None] + np.square(b).sum(axis=1) - 2 * a @ b.T
    return squares


def said(members: Sequence[Screened]) -> list[str]:
    """Return up to two sentences for a report: on the copies among checkpoints, and on equal rows.

    The list is empty if there are neither.
    """
    copies: dict[tuple[str, str], list[str]] = {}
    equal: dict[tuple[str, str], list[str]] = {}
    for c in members:
        if c.copy_of is not None:
            how = f" but for rounding ({c.dtype})" if c.copy_rounded else ""
            words = (f"is a copy of {c.copy_of}{how}", f"are copies of {c.copy_of}{how}")
            if c.bodies.compared < c.bodies.of:
                parts = f"{c.bodies.compared} of {c.bodies.of} tensors"
                what = f"the same as {c.copy_of} in all that was compared ({parts})"
                words = (f"is {what}", f"are {what}")
            copies.setdefault(words, []).append(c.label)
        elif c.equal_rows_with is not None:
            known = "" if c.bodies.is_same is False else " (other weights not compared)"
            what = f"the rows of {c.equal_rows_with}{known}"
            equal.setdefault((f"has {what}", f"have {what}"), []).append(c.label)
    return [f"{_line(names)}." for names in (copies, equal) if names]


def _line(names: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """A sentence, without its full stop, on each list of labels; its words for one, and for several."""
    parts: list[str] = []
    for (of_one, of_several), labels in list(names.items())[:_SHOWN]:
        words = of_one if len(labels) == 1 else of_several
        parts.append(f"{some(labels)} {words}")
    rest = sum(len(labels) for labels in list(names.values())[_SHOWN:])
    if rest:
        parts.append(f"likewise {count(rest, 'more checkpoint')}")
    return "; ".join(parts)
