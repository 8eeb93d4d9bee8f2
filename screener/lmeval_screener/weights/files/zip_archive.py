"""Zip archives of uncompressed entries, read by ranges.

The archive's directory is at its end: two ranges, that end and an entry's local header, locate an
entry.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Mapping

from lmeval_screener.budgets import ZIP_DIRECTORY, in_steps
from lmeval_screener.weights.tensors import DamagedError, Tensor, WeightFile

_TAIL = 65_633  # the longest end of a zip: its records and a comment
_LOCAL = b"PK\3\4"  # begins an entry
_UTF8 = 0x800  # the flag of a name in UTF-8
_UNSTATED = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)  # numbers that a 64-bit record states instead
_OTHER_PLACE = re.compile(
    r"/|.*(\\|\0|(^|/)\.\.(/|$))", re.DOTALL
)  # begins a name that leads elsewhere


async def locate(file: WeightFile, tensor: Tensor, offset: int, name: str) -> Tensor:
    """Return a tensor with its exact byte range, after reading the local header of its zip entry.

    Args:
        file: The archive.
        tensor: The tensor, placed as if the local header held nothing but the entry's name.
        offset: Position of the entry's local header in the file, in bytes.
        name: Name of the entry that holds the tensor.

    Raises:
        ScreeningError: ``BadArchive``: the entry is not at ``offset``, or the tensor reaches beyond
            the file.
    """
    shift = await _start(file, offset, name) - least_start(offset, name)
    located = tensor._replace(begin=tensor.begin + shift, end=tensor.end + shift, entry=None)
    if located.end > file.size:
        raise broken(f"{tensor.name!r} reaches beyond the file")
    return located


async def entries_of(file: WeightFile, head: bytes) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of a zip archive by name, read from its central directory.

    Args:
        file: The archive.
        head: The first four bytes of the file.

    Raises:
        ScreeningError: ``BadArchive``: the directory is broken, or entries are compressed,
            encrypted or overlapping, or their names lead out of the archive.
    """
    size = file.size
    if head[:4] != _LOCAL:
        raise broken(f"it begins with {head!r}, not as a zip archive does")
    begin = max(0, size - _TAIL)
    body = await file.read(begin, size)
    while True:
        try:
            # `zipfile` finds a directory at the end of whatever it is given.
            with zipfile.ZipFile(io.BytesIO(body)) as archive:
                break
        except (
            zipfile.BadZipFile,
            OSError,
            ValueError,
            NotImplementedError,
            struct.error,
        ) as error:
            if begin == 0 or len(body) > ZIP_DIRECTORY:
                raise broken(f"its central directory is damaged or missing ({error})") from error
        earlier = max(0, size - 8 * len(body))
        body = await file.read(earlier, begin) + body
        begin = earlier
    listed = archive.infolist()
    directory = begin + archive.start_dir
    # `zipfile` trusts one of several records and shifts places to fit: a record that differs is forged.
    record = struct.unpack_from("<HII", body, len(body) - len(archive.comment) - 12)
    held = sum(46 + len(_name(entry)) + len(entry.extra) + len(entry.comment) for entry in listed)
    true = (len(listed), held, directory)
    for announced, number, unstated in zip(record, true, _UNSTATED, strict=True):
        if announced not in (number, unstated):
            count, _, start = record
            raise broken(
                f"its end announces a central directory of {count} entries at byte {start}, which "
                "is not there"
            )
    entries: dict[str, zipfile.ZipInfo] = {}
    end = 0
    for entry in in_steps(sorted(listed, key=lambda entry: entry.header_offset)):
        name = _name(entry).decode("utf-8", "replace")
        if name in entries:
            raise broken(f"two entries have the name {name!r}")
        if _OTHER_PLACE.match(name):
            raise broken(f"the entry {name!r} has a path that leads out of the archive")
        if entry.flag_bits & 1:
            raise broken(
                f"the entry {name!r} is encrypted",
                "write the file again without encryption, as torch.save does",
            )
        if entry.compress_type or entry.compress_size != entry.file_size:
            raise broken(
                f"the entry {name!r} is compressed",
                "write the file again without compression, as torch.save does",
            )
        entry.header_offset += begin
        if entry.header_offset < end:
            raise broken(f"the entry {name!r} overlaps the entry before it")
        end = entry.header_offset + 30 + entry.file_size
        if end > directory:
            raise broken(f"the entry {name!r} reaches into the central directory")
        entries[name] = entry
    return entries


def _name(entry: zipfile.ZipInfo) -> bytes:
    """The name as stored: torch writes UTF-8, even if the entry does not say so."""
    return entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8 else "cp437")


async def _start(file: WeightFile, offset: int, name: str) -> int:
    """The offset of an entry's content: after its local header, whose length the directory omits."""
    head = await file.read(offset, least_start(offset, name))
    name_size, extra_size = struct.unpack_from("<HH", head, 26)
    if head[:4] != _LOCAL or head[30 : 30 + name_size] != name.encode():
        raise broken(f"the entry {name!r} is not at the offset that the central directory gives")
    return offset + 30 + int(name_size) + int(extra_size)


def least_start(offset: int, name: str) -> int:
    """Return the first byte at which an entry's content can begin.

    If the entry's local header holds more than the name, the content begins later.

    Args:
        offset: Position of the local header in the file, in bytes.
        name: Name of the entry.
    """
    return offset + 30 + len(name.encode())


async def content(
    file: WeightFile, entries: Mapping[str, zipfile.ZipInfo], name: str, most: int
) -> bytes:
    """Read the content of one entry of a zip archive.

    Args:
        file: The archive.
        entries: The archive's entries by name.
        name: Name of the entry.
        most: Size in bytes above which the entry is refused.

    Raises:
        ScreeningError: ``BadArchive``: the entry is larger, or is not at the offset that the
            central directory gives.
    """
    entry = entries[name]
    if entry.file_size > most:
        raise broken(
            f"the entry {name!r} has {entry.file_size:,} bytes, more than the {most:,} allowed",
            "save the weights in safetensors, with save_pretrained",
        )
    start = await _start(file, entry.header_offset, name)
    return await file.read(start, start + entry.file_size)


def broken(reason: str, step: str = "") -> DamagedError:
    """Return the error for an archive that cannot be read.

    Args:
        reason: Why it cannot be read, as a clause.
        step: What to do about it, as an imperative; empty if the file seems to be damaged.
    """
    return DamagedError("the archive", reason, "BadArchive", step)
