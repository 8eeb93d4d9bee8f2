"""The safetensors reader: what it accepts, what it refuses, and every value of every dtype."""

from __future__ import annotations

import asyncio
import json
import struct

import numpy as np
import pytest
from checkpoints import head_and_embedding, header, write_checkpoint
from hub_client import refused
from hypothesis import given
from hypothesis import strategies as st
from lmeval_screener.checkpoints.snapshot import open_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.files.safetensors import parse_header, parse_length, read_header
from lmeval_screener.weights.tensors import WeightFile, decode_rows

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def parsed(fields, data=32):
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return parse_header(body, 8 + len(body) + data)


def changed(name="a", **entry):
    return {**GOOD, name: {**GOOD[name], **entry}}


def test_a_good_header_gives_absolute_places_and_parameters():
    found = parsed(GOOD)
    start = 8 + len(json.dumps(GOOD).encode())
    assert (found.tensors["a"].begin, found.tensors["a"].end) == (start, start + 24)
    assert found.tensors["b"].shape == (4,)
    assert found.parameters == 10


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(b'{"a": ', id="cut"),
        pytest.param(b"\xff\xfe{}", id="not utf-8"),
        pytest.param(b"[1]", id="a list"),
        pytest.param(b'{"a":' * 100_000, id="deep"),
        pytest.param(b"[" * 100_000 + b"]" * 100_000, id="deep lists"),
        pytest.param(json.dumps(GOOD).replace('"b"', '"a"').encode(), id="a name twice"),
        pytest.param(
            json.dumps(GOOD).replace('"F32"', '"F32", "dtype": "I32"').encode(), id="a key twice"
        ),
        pytest.param(changed(data_offsets=[0, 25]), id="ends inside the next"),
        pytest.param(changed(shape=[2, 4]), id="shape too large"),
        pytest.param(changed(shape=[2, -3]), id="negative"),
        pytest.param(changed(shape=[-2, -3]), id="twice negative"),
        *(pytest.param(changed(shape=[n, 6 // int(n)]), id=repr(n)) for n in (True, 2.0, "2")),
        pytest.param(changed(shape=6), id="shape no list"),
        pytest.param(changed(shape=[2**40, 2**40]), id="overflow"),
        *(pytest.param(changed(dtype=d), id=f"dtype {d}") for d in ("F64", "F33", ["F32"], None)),
        pytest.param(changed(data_offsets=[0]), id="one offset"),
        pytest.param(changed(data_offsets=[0, 24.0]), id="float offset"),
        pytest.param(changed(data_offsets=[False, 24]), id="bool offset"),
        pytest.param(changed(data_offsets=[24, 0]), id="backwards"),
        pytest.param(changed(data_offsets=[8, 32]), id="overlap"),
        pytest.param(changed("b", data_offsets=[32, 40]), id="gap"),
        pytest.param(changed("b", data_offsets=[2**50, 2**50 + 8]), id="outside"),
        pytest.param(changed(strides=[1]), id="a key too many"),
        pytest.param({**GOOD, "a": {"dtype": "F32", "shape": [2, 3]}}, id="a key missing"),
        pytest.param({**GOOD, "a": [0, 24]}, id="entry no object"),
        pytest.param({"b": GOOD["b"]}, id="first bytes unclaimed"),
        pytest.param({"a": GOOD["a"]}, id="last bytes unclaimed"),
        pytest.param({}, id="nothing claimed"),
    ],
)
def test_a_corrupt_header_is_refused(fields):
    refused(parsed, fields, code="BadHeader", says="cannot be read: ")


def opened(folder, guess=65_536):
    snapshot = open_folder(folder)
    return WeightFile(snapshot, snapshot.files["model.safetensors"], guess)


@pytest.mark.parametrize("off", [-16, -10, -8, -1, 1, 8, 10, 16])
def test_a_length_that_is_a_little_off_is_refused(tmp_path, off):
    """Padding makes the JSON parse nevertheless; only the file's size shows that every row is shifted."""
    head = header([("lm_head.weight", "F32", (4, 4), 64)])
    (length,) = struct.unpack("<Q", head[:8])
    padded = head[8:].rstrip() + b" " * 40
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(padded) + off) + padded + b" " * 64
    )
    assert length < len(padded)
    refused(asyncio.run, read_header(opened(tmp_path)), code="BadHeader")


@given(st.binary(max_size=80), st.integers(0, 200))
def test_no_bytes_end_in_anything_but_a_header_or_its_error(body, size):
    for parse in (parse_header, parse_length):
        try:
            found = parse(body, size)
        except ScreeningError as error:
            assert error.code == "BadHeader"  # noqa: PT017
        else:
            assert parse is parse_header or 8 + found <= size


def test_a_header_longer_than_the_first_request_is_read_in_two(tmp_path):
    folder = write_checkpoint(tmp_path / "m", head_and_embedding())
    whole, pieced = (asyncio.run(read_header(opened(folder, guess))) for guess in (65_536, 20))
    assert pieced.tensors == whole.tensors
    assert whole.tensors.keys() == head_and_embedding().keys()


@pytest.mark.parametrize(
    ("dtype", "kind", "bits"),
    [
        ("F16", "float16", 16),
        ("BF16", "bfloat16", 16),
        ("F8_E4M3", "float8_e4m3fn", 8),
        ("F8_E5M2", "float8_e5m2", 8),
    ],
)
def test_every_code_is_decoded_as_torch_does(dtype, kind, bits):
    torch = pytest.importorskip("torch")
    codes = np.arange(2**bits).astype(f"<u{bits // 8}").tobytes()
    expected = torch.frombuffer(bytearray(codes), dtype=getattr(torch, kind)).float().numpy()
    np.testing.assert_array_equal(decode_rows(codes, dtype, 16).ravel(), expected)
