"""Bodies in brief: equal ones are found in every format, a step of training in one tensor is seen."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest
from checkpoints import write_checkpoint
from hub_server import HubServer
from lmeval_screener import screen
from lmeval_screener.checkpoints.snapshot import open_folder
from lmeval_screener.weights.body import (
    MOST,
    Bodies,
    Likeness,
    digest_of,
    keys,
    kind,
    likeness,
    read_body,
    tensors_in,
    weights_in,
)

from lmeval_dispersion.installation import data_folder

BASE = data_folder("demo") / "sums-20"
LAYERS = 40


def tensors(seed=0, dtype="F32", **changed):
    draw = np.random.default_rng(seed)
    parts = {
        f"model.layers.{i}.mlp.up_proj.weight": draw.normal(size=(9, 16)) for i in range(LAYERS)
    }
    parts["lm_head.weight"] = draw.normal(size=(1280, 16))
    return {name: (dtype, values * (1 + changed.get(name, 0))) for name, values in parts.items()}


def body(folder, most=None):
    snapshot = open_folder(str(folder))

    async def read():
        return await read_body(snapshot, await weights_in(snapshot), most)

    return asyncio.run(read())


@pytest.fixture
def written(tmp_path):
    def write(name, **options):
        write_checkpoint(tmp_path / name, tensors(**options))
        return tmp_path / name

    return write


def test_every_tensor_of_the_body_counts_and_head_and_norm_do_not(written):
    first = body(written("a"))
    assert likeness(first, body(written("b"))) == Likeness(True, LAYERS, LAYERS)
    for i, name in enumerate(tensors()):
        other = body(written(f"c{i}", **{name: 1e-3}))
        assert likeness(first, other).is_same is (name == "lm_head.weight"), name
    assert likeness(first, body(written("d", seed=1))).is_same is False


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F64"])
def test_a_conversion_is_the_same_within_rounding_and_a_step_is_not(written, dtype):
    first = body(written("a"))
    assert likeness(first, body(written("b", dtype=dtype))).is_same
    moved = {"model.layers.7.mlp.up_proj.weight": 0.05}
    assert likeness(first, body(written("c", dtype=dtype, **moved))).is_same is False


def test_a_few_tensors_are_the_same_few_of_every_checkpoint(written):
    first, second = written("a"), written("b", dtype="BF16")
    few = body(first, MOST)
    assert likeness(few, body(second)) == likeness(body(first), body(second, MOST))
    assert likeness(few, body(second, MOST)) == Likeness(True, MOST, LAYERS)
    assert likeness(few, digest_of(open_folder(str(second)), ["model.safetensors"])) == Likeness(
        None
    )
    assert likeness(few, b"") == Likeness(None)


def test_on_the_hub_equal_files_need_no_request_and_others_a_few_ranges(tmp_path, in_process):
    with HubServer() as hub:
        hub.add("org/a", BASE)
        hub.add("org/again", BASE)
        before = in_process("org/a", "org/again", "--format", "json", endpoint=hub.endpoint)
        assert '"copy_of": "org/a"' in before.stdout
        # Another body behind the same rows.
        other = shutil.copytree(BASE, tmp_path / "other")
        change(other, "model.layers.0.mlp.up_proj.weight")
        hub.add("org/lora", other)
        out = in_process("org/a", "org/lora", endpoint=hub.endpoint).stdout
    assert "Nothing to rank: org/a and org/lora have equal output rows." in out
    assert "Compare their answers: dispersion race org/a org/lora --tasks TASK." in " ".join(
        out.split()
    )
    assert "copy" not in out
    assert "Rank" not in out


def change(folder, name):
    """Add a thousandth to every number of a tensor."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    (file,) = (file for file in folder.glob("*.safetensors") if name in load_file(file))
    stored = load_file(file)
    stored[name] = (stored[name].float() + 1e-3).to(torch.bfloat16)
    save_file(stored, file, {"format": "pt"})


def test_of_several_with_the_same_rows_each_copy_has_its_own_original(tmp_path):
    names = ["a", "a2", "lora", "lora2"]
    for name in names:
        shutil.copytree(BASE, tmp_path / name)
        if name.startswith("lora"):
            change(tmp_path / name, "model.layers.1.self_attn.q_proj.weight")
    result = screen([str(tmp_path / name) for name in names])
    stands = {c.label.rpartition("/")[2]: c for c in result.checkpoints}
    of = {name: (c.copy_of or "").rpartition("/")[2] for name, c in stands.items()}
    assert of == {"a": "", "a2": "a", "lora": "", "lora2": "lora"}
    assert stands["lora"].equal_rows_with.rpartition("/")[2] == "a"
    assert {c.rank for c in stands.values()} == {1}


def test_a_body_is_found_among_those_of_another_kind_as_pair_by_pair(written):
    """Tensors that all share, conversions, and bodies of fewer tensors."""
    shared = {name: 0.0 for name in tensors()}
    bodies = []
    for number in range(6):
        changed = {name: 1e-3 * number for name in [*shared][number:]}
        for dtype in ("F32", "BF16", "F16"):
            bodies.append(body(written(f"{number}-{dtype}", dtype=dtype, **changed)))
        bodies.append(body(written(f"{number}-few", dtype="F16", **changed), MOST))
    found = 0
    for own in bodies:
        for name in {kind(other) for other in bodies} - {kind(own)}:
            others = [(place, other) for place, other in enumerate(bodies) if kind(other) == name]
            members = Bodies(tensors_in(others[0][1]))
            for place, other in others:
                members.add(place, other)
            expected = next(
                (place for place, other in others if likeness(other, own).is_same), None
            )
            assert members.same(own) == expected
            found += expected is not None
    assert found > 20


def test_bodies_share_a_key_only_if_they_are_the_same(tmp_path, written):
    """All tensors of a packed body may be of a type that is not compared."""
    folders = [written("a"), written("again"), written("other", seed=1)]
    for seed in (0, 1):
        packed = tensors(seed)
        for name, (_, values) in packed.items():
            if name != "lm_head.weight":
                packed[name] = ("U8", values)
        folders.append(tmp_path / f"packed-{seed}")
        write_checkpoint(folders[-1], packed)
    bodies = [body(folder) for folder in folders]
    assert [tensors_in(own) for own in bodies] == [LAYERS, LAYERS, LAYERS, 0, 0]
    head = {"lm_head.weight": tensors()["lm_head.weight"]}
    for name in ("head", "same-head"):
        write_checkpoint(tmp_path / name, head)
        bodies.append(body(tmp_path / name))
    bodies += [b"", bytes(8), b"a digest"]
    shared = set()
    for i, first in enumerate(bodies):
        for j, second in enumerate(bodies[:i]):
            if set(keys(first)) & set(keys(second)):
                assert likeness(first, second).is_same, (i, j)
                shared.add((j, i))
    assert shared == {(0, 1), (5, 6)}
