"""PyTorch's own format: tensors in a zip archive by ranges, with a pickle that is read but never run.

``torch.save`` writes an uncompressed zip: ``NAME/data.pkl`` lists the tensors, ``NAME/data/KEY``
holds the numbers of a storage. Three ranges (end, local header of the pickle, pickle) locate every
tensor's bytes (``zip_archive``). The pickle is a program; Python's own unpickler follows it, but
replaces every name in it by a stand-in that builds a description: nothing that the pickle names is
imported or called, and names that are not on the list are refused.

Source: https://docs.pytorch.org/docs/stable/notes/serialization.html.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from lmeval_dispersion.report.declared import some
from lmeval_screener.budgets import (
    DIMENSIONS,
    NAME,
    NUMBER,
    PICKLE,
    PICKLE_COPIED,
    PICKLE_STEPS,
    check_time,
    in_steps,
)
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.files.zip_archive import broken, content, entries_of, least_start
from lmeval_screener.weights.tensors import DTYPE_BITS, Header, Tensor, WeightFile

#: What to do about a pickle that asks for more than any real one.
_TOO_LARGE = "save the weights in safetensors, with save_pretrained"
#: torch's names of element types -> those of safetensors.
DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "UntypedStorage": "U8",
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


async def read_header(file: WeightFile) -> Header:
    """Read where a file of ``torch.save`` holds its tensors, without executing its pickle.

    Raises:
        ScreeningError: The file is broken or holds no tensors (``BadArchive``), is a bare pickle of
            an old torch (``LegacyPickle``), asks for more than tensors (``UnsafePickle``), or keeps
            its tensors in a nested dictionary (``RandomWeights``).
    """
    what = file.what
    head = await file.read(0, min(4, file.size))
    if head[:1] == b"\x80":
        raise ScreeningError(
            "LegacyPickle",
            f"cannot be screened because {what} was written by torch before 1.6, as a bare pickle; "
            "load the model and save it again with save_pretrained",
        )
    entries = await entries_of(file, head)
    pickles = [name for name in entries if name.endswith("data.pkl")]
    if len(pickles) != 1 or pickles[0].count("/") != 1:
        raise broken(
            f"expected one file NAME/data.pkl, got {some(pickles, 3) or 'none'}",
            "save the model again with save_pretrained",
        )
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in entries:
        order = await content(file, entries, f"{root}byteorder", PICKLE)
        if order.strip() != b"little":
            raise broken(
                f"its byte order is {order[:16]!r}, where b'little' is expected",
                "save the model again on a little-endian machine",
            )
    program = await content(file, entries, pickles[0], PICKLE)
    try:
        state = _Unpickler(program).load()
    except _UnsafeError as error:
        raise ScreeningError(
            "UnsafePickle",
            f"refused because the pickle of {what} {error}; no state dictionary needs that, and "
            "nothing in the pickle was executed: ask for the weights in safetensors",
        ) from error
    except ScreeningError:
        raise
    except Exception as error:  # whatever else a broken program raises in Python's reader
        raise broken(f"its pickle is broken ({type(error).__name__})") from error
    described = _described_in(state)
    if described:
        tensors = {}
        for name, tensor in in_steps(described.items()):
            tensors[name] = _placed(name, tensor, entries, root)
        return Header(tensors)
    for key, inner in state.items() if isinstance(state, dict) else ():
        if _described_in(inner):
            raise ScreeningError(
                "RandomWeights",
                f"cannot be screened because {what} keeps its tensors under the key {key!r}, where "
                f"transformers does not look; save that entry alone: "
                f"`torch.save(torch.load(FILE)[{key!r}], FILE)`",
            )
    raise broken("it holds no named tensors", "check that it is a model's state dictionary")


def _described_in(state: object) -> dict[str, _Described]:
    """The tensors of a state dictionary by name; empty for anything else."""
    tensors: dict[str, _Described] = {}
    for name, tensor in state.items() if isinstance(state, dict) else ():
        if isinstance(name, str) and isinstance(tensor, _Described):
            tensors[name] = tensor
    return tensors


class _UnsafeError(Exception):
    """A request of the pickle that no state dictionary makes."""


class _Dtype(NamedTuple):
    name: str


class _Storage(NamedTuple):
    dtype: str
    key: str
    elements: int | None


class _Described(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _described(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Described:
    if not isinstance(storage, _Storage) or len(shape) != len(strides):
        raise ValueError("a tensor is described by something other than a storage")
    if len(shape) > DIMENSIONS:
        raise broken(
            f"its pickle has a tensor of {len(shape)} dimensions, above the limit of {DIMENSIONS}"
        )
    numbers = [offset, *shape, *strides]
    if any(type(n) is not int or not 0 <= n < NUMBER for n in numbers):
        raise ValueError("a tensor has an offset, a shape or strides that are not natural numbers")
    return _Described(storage, offset, tuple(shape), tuple(strides))


def _described_v3(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> _Described:
    """A tensor whose type is stated apart from its untyped storage: the third value after the strides."""
    return _described(storage._replace(dtype=more[2].name, elements=None), offset, shape, strides)


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    pairs = list(pairs)
    _plain([key for key, _ in pairs])
    return dict(pairs)


def _plain(keys: Sequence[Any]) -> None:
    """Refuse keys that no state dictionary has: nested ones hash slowly, and chosen numbers hash alike."""
    for key in keys:
        if not (key is None or isinstance(key, str) or (type(key) is int and abs(key) < _MOST_KEY)):
            raise ValueError("a key is neither a text nor a small number")


#: Numbers of parameters are keys of an optimizer's state, and numbers of values those of the pickle's memo.
_MOST_KEY = 2**31


#: The stand-in that answers each call in a pickle.
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _described,
    ("torch._utils", "_rebuild_tensor_v2"): _described,
    ("torch._utils", "_rebuild_tensor_v3"): _described_v3,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
}


class _Steps(dict[int, Any]):
    """The table of a pickle's operations, which counts how many are looked up."""

    left = PICKLE_STEPS

    def __getitem__(self, code: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise broken(
                f"its pickle takes more operations than the limit of {PICKLE_STEPS:,}", _TOO_LARGE
            )
        if self.left % 4096 == 0:
            check_time()
        return super().__getitem__(code)


class _Unpickler(pickle._Unpickler):  # Python's own, written in Python: its steps can be replaced
    """Builds descriptions in plain containers and refuses any other request of a pickle."""

    stack: list[Any]
    memo: dict[int, Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, program: bytes) -> None:
        super().__init__(io.BytesIO(program), encoding="latin1")
        self.dispatch = _Steps(type(self).dispatch)  # type: ignore[misc]
        self._copied = 0

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        if module in ("torch", "torch.storage") and name in DTYPES:
            return _Dtype(DTYPES[name])
        raise _UnsafeError(f"calls {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", _Dtype() as dtype, key, _, elements):
                pass
            case _:
                raise _UnsafeError("refers to an object other than a storage")
        if not isinstance(key, str) or len(key) > NAME or not key.replace("_", "").isalnum():
            raise ValueError("a storage has a name that torch does not use")
        if type(elements) is not int or not 0 <= elements < NUMBER:
            raise ValueError("a storage has a number of elements that is not a natural number")
        return _Storage(dtype.name, key, elements)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        if self.stack[-1] not in _STAND_INS.values():
            raise _UnsafeError(f"calls a {type(self.stack[-1]).__name__}")
        for values in (arguments, *arguments[:DIMENSIONS]):
            self._copied += (
                len(values) if isinstance(values, tuple | list | dict | str | bytes) else 1
            )
        if self._copied > PICKLE_COPIED:
            raise broken(
                f"its pickle copies more values than the limit of {PICKLE_COPIED:,}", _TOO_LARGE
            )
        self.stack[-1] = self.stack[-1](*arguments)

    def load_build(self) -> None:
        self.stack.pop()  # the state of an ordered dictionary: versions of the layout
        if not isinstance(self.stack[-1], dict):
            raise _UnsafeError(f"sets the state of a {type(self.stack[-1]).__name__}")

    def load_put(self) -> None:
        place = self.readline()[:-1]  # type: ignore[attr-defined]
        if len(place) > len(str(_MOST_KEY)):
            raise ValueError("a place of the memo is not a small number")
        _plain([int(place)])
        self.memo[int(place)] = self.stack[-1]

    def load_setitem(self) -> None:
        _plain(self.stack[-2:-1])
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        _plain(self.stack[::2])
        super().load_setitems()  # type: ignore[misc]

    def load_dict(self) -> None:
        _plain(self.stack[::2])
        super().load_dict()  # type: ignore[misc]

    def refuse(self) -> None:
        raise _UnsafeError("asks for more than tensors in plain containers")

    dispatch[pickle.PUT[0]] = load_put
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict
    for _code in (
        pickle.INST,
        pickle.OBJ,
        pickle.NEWOBJ,
        pickle.NEWOBJ_EX,
        pickle.EXT1,
        pickle.EXT2,
        pickle.EXT4,
        pickle.EMPTY_SET,
        pickle.ADDITEMS,
        pickle.FROZENSET,
        pickle.BYTEARRAY8,
        pickle.NEXT_BUFFER,
    ):
        dispatch[_code[0]] = refuse


def _placed(
    name: str, tensor: _Described, entries: Mapping[str, zipfile.ZipInfo], root: str
) -> Tensor:
    """A tensor with its bytes, as if its entry's local header held only the name (`zip_archive.locate`)."""
    if len(name) > NAME:
        raise broken(
            f"a tensor's name has {len(name):,} characters, above the limit of {NAME:,} "
            f"({name[:40]!r}…)"
        )
    storage = tensor.storage
    called = f"{root}data/{storage.key}"
    if called not in entries:
        raise broken(f"the storage {storage.key!r} is missing")
    entry = entries[called]
    size = DTYPE_BITS[storage.dtype] // 8
    if storage.elements is not None and storage.elements * size != entry.file_size:
        raise broken(
            f"the storage of {name!r} has {entry.file_size:,} bytes, where its "
            f"{storage.elements:,} elements need {storage.elements * size:,}"
        )
    last = tensor.offset + sum(
        (n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True)
    )
    if math.prod(tensor.shape) and (last + 1) * size > entry.file_size:
        raise broken(f"{name!r} reaches beyond its storage")
    start = least_start(entry.header_offset, called)
    begin = start + tensor.offset * size
    end = start + (last + 1) * size
    place = (entry.header_offset, called)
    return Tensor(name, storage.dtype, tensor.shape, begin, end, tensor.strides, place)
