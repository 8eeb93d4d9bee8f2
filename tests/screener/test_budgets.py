"""Files that ask for more than they hold: refused by a short sentence, before anything is made of them."""

from __future__ import annotations

import asyncio
import io
import json
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from lmeval_screener import budgets, screen
from lmeval_screener.budgets import HEADER, parsed
from lmeval_screener.checkpoints.snapshot import open_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from lmeval_screener.weights.architectures import norm_of_type
from lmeval_screener.weights.files.safetensors import parse_header
from lmeval_screener.weights.rows import WeightFiles
from token_cases import TINY, own_set

from lmeval_dispersion.errors import LONGEST_MESSAGE, UsageError, brief, sentence
from lmeval_dispersion.installation import data_folder

DEMO = data_folder("demo") / "sums-20"


def refusal_of(folder: Path, name: str, body: bytes) -> ScreeningError:
    """The error of a weights file."""
    (folder / name).write_bytes(body)
    with pytest.raises(ScreeningError) as error:
        asyncio.run(WeightFiles(open_folder(folder)).header(name))
    assert len(str(error.value)) < LONGEST_MESSAGE
    return error.value


# --- pickles ---------------------------------------------------------------------------------------------


def number(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little")


#: Numbers that Python hashes alike.
ALIKE = [i * (2**61 - 1) for i in range(40_000)]
LIST = b"]q\x01(" + b"K\x01" * 20_000 + b"e0"
SIZE = b"ctorch\nSize\nq\x02"
COSTLY = {
    "copies of a list": LIST + SIZE + b"0" + b"(" + b"h\x02h\x01\x85R" * 20_000,
    "a list as arguments": LIST
    + b"ctorch._utils\n_rebuild_parameter\nq\x020"
    + b"h\x02h\x01R0" * 20_000,
    "copies of a text": b"X"
    + struct.pack("<I", 10**6)
    + b"a" * 10**6
    + b"q\x010"
    + SIZE
    + b"0"
    + b"h\x02h\x01\x85R0" * 2000,
    "pairs again and again": LIST.replace(b"K\x01", b"K\x01K\x02\x86")
    + b"ccollections\nOrderedDict\nq\x02"
    + b"0h\x02h\x01\x85R" * 20_000,
    "numbers of one hash": b"}(" + b"".join(number(value) + b"N" for value in ALIKE) + b"u",
    "places of one hash": b"N" + b"".join(b"p%d\n" % value for value in ALIKE),
    "many steps": b"N0" * 500_000,
    "many dimensions": b"ctorch._utils\n_rebuild_tensor\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00("
    + b"K\x01" * 100
    + b"t("
    + b"K\x01" * 100
    + b"ttR",
}


@pytest.mark.parametrize("program", COSTLY.values(), ids=COSTLY)
def test_a_pickle_that_asks_for_much(tmp_path, program):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("m/data.pkl", b"\x80\x02" + program + b".")
    error = refusal_of(tmp_path, "pytorch_model.bin", content.getvalue())
    assert error.code in ("BadArchive", "UnsafePickle")
    assert re.search(
        "copies more than|takes more than|dimensions, more than|ValueError", str(error)
    )
    assert re.search("save it again|in safetensors", str(error))


# --- safetensors -----------------------------------------------------------------------------------------


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], **changes}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"a": entry(shape=[2**62 - 1] * 9000)}, "9000 dimensions"),
        ({"a": entry(shape=[1] * 21)}, "21 dimensions"),
        ({"a" * 5_000_000: entry()}, "has 5,000,000 characters"),
        ({"a": entry(shape=list(range(-20_000, 0)))}, "is not a list of natural numbers"),
        ({"a": entry(dtype="x" * 10**6)}, "unknown dtype"),
        ({"a": entry(dtype=json.loads("[" * 900 + "]" * 900))}, "nested more than 12 levels deep"),
        (b'{"a":[' + b"[]," * 3_000_000 + b"[]]}", "brackets, colons and commas"),
        (b'{"a":[' + b'{"":{}},' * 500_000 + b"[]]}", "objects"),
        (b'{"a":"' + b"x" * HEADER.size + b'"}', "bytes, more than"),
    ],
)
def test_a_safetensors_header_that_asks_for_much(tmp_path, fields, says):
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    file = struct.pack("<Q", len(body)) + body + bytes(1)
    error = refusal_of(tmp_path, "model.safetensors", file)
    assert error.code == "BadHeader"
    assert says in str(error)
    assert len(str(error)) < 1500
    assert str(error).endswith("wait until it is written, or save it again")


def test_a_header_as_large_as_the_largest_is_read():
    count = HEADER.marks // budgets.MARGIN // 12
    name = "base_model.model.model.layers.10.mlp.experts.{}.down_proj.lora_A.weight"
    fields = {name.format(i): entry(data_offsets=[i, i + 1]) for i in range(count)}
    body = json.dumps(fields, separators=(",", ":")).encode()
    assert len(parse_header(body, 8 + len(body) + count).tensors) == count


@pytest.mark.parametrize(
    "text", ['{"a": "\\\\"}', '{"a": "[[[{\\"[[["}', '[[["]]"]]]', '{"a\\\\\\"{{{{": {}}']
)
def test_brackets_in_texts_are_not_depth(text):
    assert parsed(text.encode(), budgets.Json(100, 100, 100, 3)) == json.loads(text)
    with pytest.raises(ValueError, match="deep"):
        parsed(b"[[[[" + text.encode() + b"]]]]", budgets.Json(100, 100, 100, 4))


# --- GGUF ------------------------------------------------------------------------------------------------


def gguf(*pairs: tuple[str, int, bytes], count: int | None = None, tensors: int = 0) -> bytes:
    """A header of GGUF with these pairs, and as many zeros behind it as its counts need."""
    body = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(pairs) if count is None else count)
    for name, kind, value in pairs:
        body += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value
    return body + bytes(2**21)


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


TYPES = "tokenizer.ggml.token_type"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (gguf(*[(f"a{i}", 9, array(0, 10**6, bytes(10**6))) for i in range(8)]), "hold more than"),
        (gguf((TYPES, 9, array(2, 6_000_000, bytes(12_000_000)))), "hold more than"),
        (
            gguf(("tokenizer.ggml.tokens", 9, array(8, 10**6)), ("b", 9, array(9, 10**9))),
            "ends beyond the file",
        ),
        (gguf(("a", 8, struct.pack("<Q", 2**63))), "beyond the file"),
        (gguf(("a", 9, array(8, 3, struct.pack("<Q", 2**63)))), "beyond the file"),
        (gguf(("a", 9, array(6, 2**62))), "hold more than"),
        (gguf(("a" * 70_000, 4, bytes(4))), "70,000 characters"),
        (gguf(count=100_000), "announces 100,000 pairs"),
        (gguf(tensors=80_000), "80,000 tensors"),
    ],
)
def test_a_gguf_header_that_asks_for_much(tmp_path, body, says):
    error = refusal_of(tmp_path, "m.gguf", body)
    assert error.code == "BadHeader"
    assert re.search(says, str(error)), str(error)


# --- tokenizers ------------------------------------------------------------------------------------------


def tokenizer(**parts: Any) -> bytes:
    vocab = {piece: row for row, piece in enumerate(["Ġthe", "7", "Ġ", "t", "h", "e"])}
    data = {
        "model": {"type": "BPE", "vocab": vocab},
        "pre_tokenizer": {"type": "ByteLevel"},
        **parts,
    }
    return json.dumps(data).encode()


def replace(sign: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": sign}, "content": content}


@pytest.mark.parametrize(
    "body",
    [
        tokenizer(normalizer={"type": "Sequence", "normalizers": [replace("t", "tt")] * 60}),
        tokenizer(normalizer={"type": "Sequence", "normalizers": [replace("t", "x" * 10**6)]}),
        tokenizer(normalizer={"type": "Sequence", "normalizers": [replace("t", "t")] * 10**5}),
        tokenizer(
            added_tokens=[{"id": i, "content": f"<{i}>"} for i in range(budgets.ADDED_TOKENS + 1)]
        ),
        tokenizer(added_tokens=[json.loads("[" * 900 + "]" * 900)]),
        b"[" * 10**5,
    ],
)
def test_a_tokenizer_that_asks_for_much(body):
    with pytest.raises(ScreeningError) as error:
        Vocabulary.from_file("tokenizer.json", body).row(" the")
    assert error.value.code == "BadTokenizer"
    assert len(str(error.value)) < 1000


def test_added_tokens_inside_a_word_are_found_by_the_word():
    added = [{"id": 10 + i, "content": f"<{i}>"} for i in range(50_000)]
    vocabulary = Vocabulary.from_file(
        "tokenizer.json", tokenizer(added_tokens=[*added, {"id": 9, "content": "he"}])
    )
    assert vocabulary.row(" the") is None
    assert vocabulary.row("7") == (1, "7")


# --- token sets ------------------------------------------------------------------------------------------

LAUGHS = "\n".join(
    ["a: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10))]
)


@pytest.mark.parametrize(
    "text",
    [
        f"{TINY}notes: 2026-13-45\n",
        f"{TINY}notes: 2026-01-01T99:99:99Z\n",
        f"{TINY}notes: !!timestamp x\n",
        f"{TINY}notes: !!int x\n",
        f"{TINY}notes: {'9' * 5000}\n",
        TINY.replace("min_tokens: 2", f"min_tokens:\n  {LAUGHS}".replace("\n", "\n  ")),
        f"{TINY}notes:\n  {LAUGHS}".replace("\na", "\n  a"),
        f"{TINY}notes: [{'a, ' * 100_000}]\n",
        f"{TINY}notes: {'x' * 2_000_000}\n",
    ],
)
def test_a_token_set_that_yaml_cannot_make(tmp_path, text):
    with pytest.raises(UsageError, match="expected") as error:
        load_token_set(own_set(tmp_path, text))
    assert len(str(error.value)) < 1000


# --- configurations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [[], {}, None, 1, "new"])
def test_a_norm_of_an_unknown_kind_is_unknown(kind):
    config = {"layer_norm_type": kind, "layer_norm_with_affine": True}
    assert norm_of_type("hf_olmo", config) is None


# --- time ------------------------------------------------------------------------------------------------


def test_the_time_of_a_checkpoint_reaches_what_does_not_wait(tmp_path, monkeypatch):
    """A folder is read without an event loop, which could stop it."""
    monkeypatch.setenv("DISPERSION_TIMEOUT", "1e-9")
    result = screen([str(DEMO)])
    assert [failed.error for failed in result.failed] == ["Timeout"]
    assert "DISPERSION_TIMEOUT" in result.failed[0].message


@pytest.mark.parametrize(
    "read",
    [
        lambda: parsed(b"{}", HEADER),
        lambda: list(budgets.in_steps([1])),
        lambda: Vocabulary.from_file("tokenizer.json", tokenizer()),
    ],
)
def test_parsers_end_with_their_time(read):
    read()
    with budgets.timed(lambda: -1.0), pytest.raises(ScreeningError) as error:
        read()
    assert error.value.code == "Timeout"


# --- messages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, "'" + "a b " * 10**5 + "'", "(" + "1, " * 10**5 + ")", "[" + "1, " * 10**5 + "]"],
)
def test_a_long_value_is_cut_and_the_next_step_is_not(value):
    text = sentence(
        f"the tensor {value} has the shape {value}; compare its sha256 or upload it again"
    )
    assert len(text) < 1000
    assert " has the shape " in text
    assert text.startswith("the tensor ")
    assert text.endswith("; compare its sha256 or upload it again")


def test_a_message_without_an_end_is_cut_in_its_middle():
    text = sentence(f"expected one of {'word ' * 10**5}; name one")
    assert len(text) <= LONGEST_MESSAGE + 10
    assert text.startswith("expected one of")
    assert text.endswith("; name one")


def test_what_is_inside_a_value_costs_its_message_nothing():
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep, deep]
    assert len(brief(deep)) < 1000
