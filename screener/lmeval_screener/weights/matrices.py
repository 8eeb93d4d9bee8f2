"""A stored matrix: in which file its numbers are, and how they lie there."""

from __future__ import annotations

from dataclasses import dataclass

from lmeval_screener.weights.element_types import row_bytes
from lmeval_screener.weights.safetensors import DTYPE_BITS, Tensor


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that can be read row by row.

    Attributes:
        name: Name of the tensor.
        file: The file that holds it.
        dtype: A dtype of safetensors or a type of GGUF's.
        shape: Rows and width.
        begin: Absolute offset of its first byte in the file.
        strides: Bytes from row to row and from column to column, where rows do not lie end to end.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, int]
    begin: int
    strides: tuple[int, int] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return row_bytes(self.dtype, self.shape[1])


@dataclass(frozen=True, slots=True)
class NormPlace:
    """Where a GGUF file keeps its final norm.

    Attributes:
        weight: Its weight as a column of d numbers; None where the architecture's norm has none.
        takes_mean: Whether it is a LayerNorm.
    """

    weight: Matrix | None
    takes_mean: bool


def byte_strides(tensor: Tensor) -> tuple[int, int] | None:
    """Bytes from row to row and from column to column of a matrix; None where rows lie end to end."""
    if tensor.strides is None or len(tensor.shape) != 2 or tensor.strides == (tensor.shape[1], 1):
        return None
    element = DTYPE_BITS[tensor.dtype] // 8
    return tensor.strides[0] * element, tensor.strides[1] * element


def matrix_of(tensor: Tensor, file: str) -> Matrix:
    """A stored tensor of two dimensions as a matrix; one of fewer as a column."""
    rows, width = tensor.shape if len(tensor.shape) == 2 else (tensor.elements, 1)
    return Matrix(tensor.name, file, tensor.dtype, (rows, width), tensor.begin, byte_strides(tensor))
