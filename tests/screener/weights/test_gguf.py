"""GGUF files, local and remote: the dequantised matrix's gap, few bytes, no broken header believed."""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import TOKENS, WIDTH, matrix, truth, write
from hub_client import IDS, gap_of, refused, unread, within
from lmeval_screener import screen
from lmeval_screener.weights.files.gguf import GGUF_TYPES, choose_files, read_gguf
from lmeval_screener.weights.projection import read_rows

from lmeval_dispersion import geometry


def packed(dtype: str, seed: int = 0) -> np.ndarray:
    """Blocks of a type that only llama.cpp quantises: any bytes whose half floats are finite."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    rows = len(TOKENS)
    return np.random.default_rng(seed).integers(
        1, 0x40, size=(rows, WIDTH // weights * size), dtype=np.uint8
    )


def screened(place: Path) -> Any:
    """The one checkpoint of a file that is read."""
    (found,) = screen([str(place)]).checkpoints
    return found


PLAIN = ["F32", "F16", "BF16"]
BLOCKS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
OF_LLAMA_CPP = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]


@pytest.mark.parametrize("dtype", [*PLAIN, *BLOCKS, *OF_LLAMA_CPP])
def test_gap_is_that_of_the_dequantised_matrix(tmp_path, dtype):
    tied = dtype in OF_LLAMA_CPP
    head = packed(dtype) if tied else matrix()
    tensors = {"token_embd.weight": ("F16", matrix(1)), "output.weight": (dtype, head)}
    write(tmp_path / "m.gguf", {"token_embd.weight": (dtype, head)} if tied else tensors)
    found = screened(tmp_path / "m.gguf")
    assert found.gaps["cosine"].mean == pytest.approx(gap_of(truth(dtype, head), found), abs=1e-6)
    words = [*found.resolution.domain, *found.resolution.reference]
    assert [token.piece for token in words] == [TOKENS[token.id] for token in words]
    assert (found.dtype, found.tied) == (dtype, tied)
    assert bool(found.notes) == (dtype not in PLAIN)


def test_a_model_in_parts(tmp_path):
    full = matrix()
    parts = write(
        tmp_path / "m-Q8_0.gguf",
        {
            "token_embd.weight": ("F16", matrix(1)),
            "x": ("F32", matrix(2)),
            "output.weight": ("Q8_0", full),
        },
        parts=1,
    )
    assert len(parts) == 3
    found = screened(f"{tmp_path}:q8_0")
    assert found.gaps["cosine"].mean == pytest.approx(gap_of(truth("Q8_0", full), found), abs=1e-6)
    assert found.file == "m-Q8_0-00003-of-00003.gguf"
    parts[1].unlink()
    unread(tmp_path, "FileNotFound", "2 of the 3 parts")


def test_the_file_that_is_meant():
    names = ["M-Q4_K_M.gguf", "M-Q4_K_S.gguf", "mmproj-M.gguf", "model.safetensors"]
    names += [f"big/M-F16-0000{i}-of-00002.gguf" for i in (1, 2)]
    for choice in ("Q4_K_S", "q4_k_s", "M-Q4_K_S.gguf"):
        assert choose_files(names, choice, "r") == ("M-Q4_K_S.gguf",)
    assert choose_files(["M-Q4_0.gguf", "M-Q4_0_4_4.gguf"], "Q4_0", "r") == ("M-Q4_0.gguf",)
    for choice in ("F16", "M-F16-00001-of-00002.gguf"):
        assert len(choose_files(names, choice, "r")) == 2
    assert choose_files(["big/M-F16.gguf", *names[-2:]], None, "r") == ("big/M-F16.gguf",)
    refused(choose_files, ["mmproj-M.gguf"], None, "r", says="no GGUF file that holds a model")
    for choice, code in ((None, "SeveralFiles"), ("Q4_K", "SeveralFiles"), ("Q9", "FileNotFound")):
        refused(choose_files, names, choice, "r", code=code, says="M-Q4_K_S.gguf")


def test_two_quantisations_of_one_model_are_one_group(tmp_path):
    full = matrix()
    for dtype in ("Q8_0", "Q4_0"):
        write(tmp_path / f"m-{dtype}.gguf", {"output.weight": (dtype, full)})
    for before, after in ((":", ""), ("/m-", ".gguf")):
        names = [f"{tmp_path}{before}{dtype}{after}" for dtype in ("Q8_0", "Q4_0")]
        (group,) = screen(names).groups
        assert {f"{tmp_path.parent}/{c.label}" for c in group.checkpoints} == set(names)
    unread(tmp_path, "SeveralFiles", "it holds 2 GGUF models")


def test_types_are_those_of_the_gguf_package():
    theirs = {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    newer = GGUF_TYPES.keys() - theirs.keys()
    assert newer <= {39, 40, 41}, "types that older releases of the package do not know"
    assert {code: theirs[code] for code in GGUF_TYPES.keys() - newer} == {
        code: kind for code, kind in GGUF_TYPES.items() if code not in newer
    }


def remote(hub, cache):
    async def work(client, account):
        snapshot = await client.snapshot("org/model", None, account)
        model = await read_gguf(snapshot, ["m.gguf"])
        words = await model.vocabulary()
        assert words.row("7") == (TOKENS.index("7"), "7")
        assert {words.row(token) for token in ("<s>", "<0x37>", "+")} == {None}, "none is a word"
        return await read_rows(model.projection, IDS), snapshot.account

    return within(work, cache, endpoint=hub.endpoint)


def test_remote_bytes_stay_near_header_and_rows(hub, tmp_path):
    """A header of several pieces: 3 MB of vocabulary; what travels is the header, the rows, and one piece."""
    full = matrix()
    place = tmp_path / "repo" / "m.gguf"
    place.parent.mkdir()
    write(place, {"output.weight": ("F32", full)}, notes="x" * 3_000_000)
    size = place.stat().st_size
    hub.add("org/model", place.parent)
    rows, account = remote(hub, tmp_path / "cache")
    np.testing.assert_array_equal(rows, full[list(IDS)])
    header = size - full.nbytes
    assert account.bytes_read < 1.5 * (header + rows.nbytes) < size + 1_300_000
    first = len(hub.requests)
    again, account = remote(hub, tmp_path / "cache")
    np.testing.assert_array_equal(again, rows)
    assert account.bytes_read < 2000, "a second time nothing is read"
    assert len(hub.requests) - first <= 3


def at(data: bytes, key: str) -> int:
    """The byte behind a key: its type."""
    return data.index(key.encode()) + len(key)


def patched(data: bytes, offset: int, kind: str, value: int) -> bytes:
    body = struct.pack("<" + kind, value)
    return data[:offset] + body + data[offset + len(body) :]


def corruptions(data: bytes) -> dict[str, bytes]:
    """Ways to break a header, by name."""
    tokens, types = at(data, "tokenizer.ggml.tokens"), at(data, "tokenizer.ggml.token_type")
    pre, out = at(data, "tokenizer.ggml.pre"), at(data, "output.weight")
    second = data.index(b"\x01\x00\x00\x00\x00\x00\x00\x00x", out) + 9
    huge = 2**60
    return {
        "magic": b"GGML" + data[4:],
        "version 1": patched(data, 4, "I", 1),
        "big endian": patched(data, 4, ">I"[1:], 0x03000000),
        "tensors 2^60": patched(data, 8, "Q", huge),
        "pairs 2^60": patched(data, 16, "Q", huge),
        "one pair more": patched(data, 16, "Q", struct.unpack_from("<Q", data, 16)[0] + 1),
        "one tensor more": patched(data, 8, "Q", 3),
        "key length 2^60": patched(data, 24, "Q", huge),
        "value type 13": patched(data, pre, "I", 13),
        "string beyond the file": patched(data, pre + 4, "Q", len(data)),
        "array of 2^60 strings": patched(data, tokens + 8, "Q", huge),
        "array of 2^60 numbers": patched(data, types + 8, "Q", huge),
        "array of arrays": patched(data, tokens + 4, "I", 9),
        "array of unknown": patched(data, tokens + 4, "I", 77),
        "fewer token types": patched(data, types + 8, "Q", 1),
        "no dimension": patched(data, out, "I", 0),
        "width 0": patched(data, out + 4, "Q", 0),
        "height 2^39": patched(data, out + 12, "Q", 2**39),
        "unknown type": patched(data, out + 20, "I", 200),
        "removed type": patched(data, out + 20, "I", 4),
        "offset outside": patched(data, out + 24, "Q", 2**40),
        "offset unaligned": patched(data, out + 24, "Q", 8),
        "overlap": patched(data, second + 24, "Q", 32),
        "tensor twice": data.replace(
            struct.pack("<Q", 1) + b"x" + data[second : second + 4],
            struct.pack("<Q", 13) + b"output.weight" + data[second : second + 4],
        ),
        "key twice": data.replace(b"general.architecture", b"tokenizer.ggml.model", 1),
        "no vocabulary": data.replace(b"ggml.tokens", b"ggml.tokenz"),
        "a vocabulary of numbers": data.replace(b"ggml.tokens", b"ggml.tokenz").replace(
            b"ggml.scores", b"ggml.tokens"
        ),
        "cut in the header": data[: out - 40],
        "cut in the data": data[:-100],
        "empty": b"",
    }


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write(place, {"output.weight": ("F32", matrix()), "x": ("F32", matrix(3)[:4])})
    return place.read_bytes()


def test_a_broken_header_is_named_and_never_believed(tmp_path, whole_file):
    for name, broken in corruptions(whole_file).items():
        assert broken != whole_file, name
        (tmp_path / "m.gguf").write_bytes(broken)
        (failed,) = screen([str(tmp_path / "m.gguf")]).failed
        assert failed.error in ("BadHeader", "BadTokenizer"), (name, failed)


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_end_in_the_right_gap_or_a_named_error(tmp_path, whole_file, seed):
    draw = random.Random(seed)
    data = bytearray(whole_file)
    header = len(data) - 404 * WIDTH * 4
    for _ in range(draw.randint(1, 4)):
        data[draw.randrange(header)] = draw.randrange(256)
    (tmp_path / "m.gguf").write_bytes(data)
    result = screen([str(tmp_path / "m.gguf")])
    codes = {
        "BadHeader",
        "BadTokenizer",
        "NoOutputProjection",
        "TooFewTokens",
        "BadRows",
        "QuantizedTensor",
    }
    assert all(failed.error in codes for failed in result.failed), result.failed


def test_without_the_gguf_package_the_sentence_names_the_extra(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf", {"output.weight": ("Q8_0", matrix())})
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    unread(tmp_path / "m.gguf", "MissingExtra", "lmeval-dispersion[gguf]")
    write(tmp_path / "plain.gguf", {"output.weight": ("BF16", matrix())})
    assert screened(tmp_path / "plain.gguf"), "16-bit rows need no package"


GAMMA = np.random.default_rng(3).uniform(0.5, 2.0, WIDTH)


@pytest.mark.parametrize(
    ("architecture", "gamma", "more", "takes_mean"),
    [
        ("llama", GAMMA, (), False),
        ("command-r", GAMMA, (), True),
        ("gpt2", GAMMA, ("output_norm.bias",), True),
        ("olmo", None, (), True),
    ],
)
def test_the_ratio_is_that_of_llama_cpps_norm(tmp_path, architecture, gamma, more, takes_mean):
    """By the definition on the whole matrix."""
    full, weights = matrix(), {} if gamma is None else {"output_norm.weight": ("F32", gamma)}
    weights |= {"output.weight": ("F32", full), **{name: ("F32", np.zeros(WIDTH)) for name in more}}
    write(tmp_path / "m.gguf", weights, architecture=architecture)
    found = screened(tmp_path / "m.gguf")
    seen = full.astype(float) * (1 if gamma is None else gamma)
    seen -= seen.mean(axis=1, keepdims=True) if takes_mean else 0
    sides = found.resolution.domain_ids, found.resolution.reference_ids
    t, r = (geometry.within(seen[ids], metric="euclidean").mean for ids in sides)
    assert found.ratio.mean == pytest.approx(t / r, abs=1e-6)


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        ({}, "does not hold output_norm.weight as floating"),
        (
            {"output_norm.weight": ("F32", GAMMA), "output.bias": ("F32", GAMMA)},
            "the final normalisation layer of gemma9 is not known",
        ),
        ({"output_norm.weight": ("F32", np.ones(WIDTH // 2))}, f"{WIDTH} floating-point numbers"),
        ({"output_norm.weight": ("F32", np.full(WIDTH, np.nan))}, "zero or not finite"),
    ],
)
def test_where_a_file_tells_no_final_norm_a_reason_stands(tmp_path, norm, reason):
    architecture = "gemma9" if "gemma9" in reason else "llama"
    write(
        tmp_path / "m.gguf", {"output.weight": ("F32", matrix())} | norm, architecture=architecture
    )
    found = screened(tmp_path / "m.gguf")
    assert found.ratio is None
    assert any("projection has a bias" in note for note in found.notes) is ("output.bias" in norm)
    assert reason in found.no_ratio
