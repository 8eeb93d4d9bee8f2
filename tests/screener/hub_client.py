"""Reading of the loopback Hub (or of a folder) in this process, and the slow truth to compare it with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import slow_gap
from huggingface_hub import constants
from lmeval_screener import screen
from lmeval_screener.checkpoints.account import Account
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.snapshot import Snapshot, open_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.screened import Failed
from lmeval_screener.weights.projection import OutputProjection, find_projection, read_rows
from numpy.typing import NDArray

#: Rows that tests ask for: neighbours, a gap that is bridged, one far away, the last, out of order.
IDS = (7, 3, 4, 6, 90, 119)
HEAD = "lm_head.weight"
FILE = "model.safetensors"
NO_HUB = "http://127.0.0.1:1"
#: Bits of exponent and mantissa.
FORMATS = {
    **{"F64": (11, 52), "F32": (8, 23), "F16": (5, 10), "BF16": (8, 7)},
    **{"F8_E4M3": (4, 3), "F8_E5M2": (5, 2)},
}


@dataclass
class Read:
    """Rows of one reading, and where they came from."""

    rows: NDArray[np.float32]
    projection: OutputProjection
    snapshot: Snapshot


def within(
    work: Callable[[Hub, Account], Any],
    cache: Path,
    *,
    timeout: float = 20.0,
    endpoint: str = NO_HUB,
    token: str | None = None,
    offline: bool = False,
) -> Any:
    """The result of work with a client of a cache; fails if it hangs."""

    async def run() -> Any:
        async with Hub(offline=offline) as client:
            account = client.account.part(timeout)
            return await account.bounded(work(client, account))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_ASSETS_CACHE", str(cache))
        patch.setattr(constants, "ENDPOINT", endpoint)
        patch.setenv("HF_TOKEN", token or "")
        return asyncio.run(asyncio.wait_for(run(), 60))


def read(
    hub: Any,
    cache: Path,
    repo: str = "org/model",
    revision: str | None = None,
    *,
    ids: tuple[int, ...] = IDS,
    **settings: Any,
) -> Read:
    """Rows of the output projection of a checkpoint on the loopback Hub."""

    async def work(client: Hub, account: Account) -> Read:
        return await read_of(await client.snapshot(repo, revision, account), ids)

    return within(work, cache, endpoint=hub.endpoint, **settings)


def refused(
    work: Callable[..., Any], *args: Any, code: str = "", says: str = "", **settings: Any
) -> ScreeningError:
    """The error that some work ends in, of this code and with these words if they are given."""
    with pytest.raises(ScreeningError) as raised:
        work(*args, **settings)
    assert raised.value.code == (code or raised.value.code)
    assert says in str(raised.value)
    return raised.value


def unread(name: object, code: str, says: str, **settings: Any) -> Failed:
    """The failure of a checkpoint that is screened alone, of this code and with these words."""
    (failed,) = screen([str(name)], **settings).failed
    assert (failed.error, says in failed.message) == (code, True), failed
    return failed


async def read_of(snapshot: Snapshot, ids: tuple[int, ...] = IDS) -> Read:
    """Rows of the output projection of a snapshot."""
    projection = await find_projection(snapshot)
    return Read(await read_rows(projection, ids), projection, snapshot)


def read_folder(folder: Path, ids: tuple[int, ...] = IDS) -> Read:
    """Rows of the output projection of a checkpoint in a folder."""
    return asyncio.run(read_of(open_folder(folder), ids))


def truth(folder: Path, ids: tuple[int, ...] = IDS) -> NDArray[np.float64]:
    """The same rows by the whole matrix of a folder, whichever file has it."""
    (file,) = (
        place for place in folder.glob("*.safetensors") if HEAD.encode() in place.read_bytes()
    )
    return full_matrix(file, HEAD)[list(ids)]


def full_matrix(file: Path, name: str) -> NDArray[np.float64]:
    """A whole matrix in float64: unsigned integers, taken apart by the definition of finite floats."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + length])[name]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    exponent_bits, mantissa_bits = FORMATS[entry["dtype"]]
    width = (1 + exponent_bits + mantissa_bits) // 8
    code = np.frombuffer(raw[begin:end], f"<u{width}").astype(np.int64).reshape(entry["shape"])
    sign = 1 - 2.0 * (code >> (exponent_bits + mantissa_bits) & 1)
    exponent, mantissa = (
        code >> mantissa_bits & (2**exponent_bits - 1),
        code & (2**mantissa_bits - 1),
    )
    # A subnormal number has no leading one, and the exponent of the smallest normal one.
    significand = np.where(exponent == 0, mantissa, mantissa + 2**mantissa_bits).astype(float)
    bias = 2 ** (exponent_bits - 1) - 1
    return sign * np.ldexp(significand, np.maximum(exponent, 1) - bias - mantissa_bits)


def whole_gap(folder: Path, checkpoint: Any) -> float:
    """G of a screened checkpoint by its definition, from the whole matrix in a folder."""
    return gap_of(full_matrix(folder / checkpoint.file, checkpoint.tensor), checkpoint)


def gap_of(matrix: NDArray[Any], checkpoint: Any, metric: str = "cosine") -> float:
    """The same of a matrix that is known."""
    tokens = checkpoint.resolution
    return slow_gap(matrix[tokens.domain_ids], matrix[tokens.reference_ids], metric)
