"""The files of a checkpoint's weights: each header is read once and kept on disk, whichever its format."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.checkpoints import Snapshot, content_key
from lmeval_screener.weights import gguf_header, safetensors, torch_archive
from lmeval_screener.weights.rows import Matrix
from lmeval_screener.weights.tensors import Header, Tensor

#: Part of every entry's key: raise it when what is kept of a header changes.
_VERSION = 1


class WeightFiles:
    """Headers and matrices of a checkpoint.

    Args:
        snapshot: The checkpoint.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._headers: dict[str, Header] = {}

    async def header(self, file: str, guess: int = 65_536) -> Header:
        """Header of a safetensors file, of a GGUF file or of an archive of ``torch.save``."""
        if file not in self._headers:
            self._headers[file] = await self._header(file, guess)
        return self._headers[file]

    async def _header(self, file: str, guess: int) -> Header:
        cache, key = self.snapshot.cache, f"{_VERSION} {content_key(self.snapshot, file)}"
        kept = cache.read("headers", key) if cache else None
        if kept is not None:
            return _header_of(kept)
        if file.endswith(".bin"):
            header = await torch_archive.read_header(self.snapshot, file)
        elif file.endswith(".gguf"):
            header = await gguf_header.read_header(self.snapshot, file)
        else:
            header = await safetensors.read_header(self.snapshot, file, guess)
        if cache:
            cache.write("headers", key, _text_of(header))
        return header

    async def matrix(self, file: str, tensor: Tensor, bridge: int = 0) -> Matrix:
        """A stored tensor as a matrix; see `Matrix.of`."""
        if tensor.entry is not None:
            (tensor,) = await torch_archive.locate(self.snapshot, file, [tensor])
        return Matrix.of(self.snapshot, file, tensor, bridge)

    async def vector(self, file: str, tensor: Tensor) -> NDArray[np.float32]:
        """All numbers of a stored tensor that lie end to end, shape (elements,)."""
        row = replace(await self.matrix(file, tensor), shape=(1, tensor.elements))
        numbers: NDArray[np.float32] = (await row.read([0]))[0]
        return numbers


def _text_of(header: Header) -> bytes:
    tensors = {
        name: (t.dtype, t.shape, t.begin, t.end, t.strides, t.entry) for name, t in header.tensors.items()
    }
    return json.dumps([tensors, header.slices, header.architecture, header.tokenizer]).encode()


def _header_of(content: bytes) -> Header:
    tensors, slices, architecture, tokenizer = json.loads(content)
    return Header(
        {
            name: Tensor(name, dtype, tuple(shape), begin, end, _tuple(strides), _tuple(entry))
            for name, (dtype, shape, begin, end, strides, entry) in tensors.items()
        },
        {name: _tuple(offsets) for name, offsets in slices.items()},
        architecture,
        tokenizer,
    )


def _tuple(values: list[Any] | None) -> Any:
    return None if values is None else tuple(values)
