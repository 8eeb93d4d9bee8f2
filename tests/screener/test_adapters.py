"""Adapters: rows equal PEFT's merged model, and one that changes no row is level with its base."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_client import ours
from lmeval_screener import screen, screening
from lmeval_screener.checkpoints.snapshots import open_folder
from lmeval_screener.cli import main
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.adapters import adapted_projection, is_adapter, read_adapter
from lmeval_screener.weights.projection import FinalNorm, read_rows, read_rows_and_norm
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_ratio import TOKENIZER, R, T, V
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore")
D = 16
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tied(request):
    return request.param


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A tiny Llama on disk, untied and tied."""
    folders = {}
    for tied in (False, True):
        torch.manual_seed(0)
        sizes = {"hidden_size": D, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=V, tie_word_embeddings=tied, **sizes, **heads)
        folder = tmp_path_factory.mktemp("base") / f"tied-{tied}"
        LlamaForCausalLM(config).save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes(TOKENIZER)
        folders[tied] = folder
    return folders


@pytest.fixture
def base(bases, tied):
    return bases[tied]


def adapter(base: Path, folder: Path, settings: Any, *, bin_file: bool = False) -> Path:
    """An adapter as PEFT saves it, every trained number moved off its start."""
    torch.manual_seed(1)
    # PEFT writes into the settings that it is given.
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), copy.deepcopy(settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                step = torch.randn_like(parameter) * 0.3
                parameter.add_(step.abs() if "magnitude" in name else step)
    model.save_pretrained(folder, safe_serialization=not bin_file)
    assert (folder / FILE).exists() is not bin_file
    return folder


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], **settings})


def merged(base: Path, folder: Path) -> np.ndarray:
    """The output projection of PEFT's merged model."""
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder).merge_and_unload()
    return model.get_output_embeddings().weight.detach().numpy()


def head_of(folder: Path) -> np.ndarray:
    return LlamaForCausalLM.from_pretrained(folder).get_output_embeddings().weight.detach().numpy()


async def projection_of(snapshot: Any, base: Path) -> Any:
    assert is_adapter(snapshot)
    return await adapted_projection(await read_adapter(snapshot), open_folder(base))


def notes(folder: Path, base: Path) -> tuple[str, ...]:
    return asyncio.run(projection_of(open_folder(folder), base)).warnings


def rows(folder: Path, base: Path) -> np.ndarray:
    async def work() -> np.ndarray:
        snapshot = open_folder(folder)
        projection = await projection_of(snapshot, base)
        return await read_rows(projection, list(range(projection.shape[0])))

    return asyncio.run(work())


def same_rows(notes: tuple[str, ...]) -> bool:
    return any(note.startswith("same rows as its base ") for note in notes)


def refused(folder: Path, base: Path) -> ScreeningError:
    with pytest.raises(ScreeningError) as caught:
        rows(folder, base)
    return caught.value


def edit(folder: Path, **changes: Any) -> None:
    place = folder / "adapter_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))


ENSURED = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
HEADS = {
    "head": lora(target_modules=["lm_head"]),
    "head of stabilised rank": lora(target_modules=["lm_head"], use_rslora=True),
    "head of DoRA": lora(target_modules=["lm_head", "q_proj"], use_dora=True),
    "rank and alpha by pattern": lora(
        target_modules=["lm_head", "q_proj"], rank_pattern={"lm_head": 2}, alpha_pattern={"lm_head": 9}
    ),
    "all linear layers and the head": lora(target_modules=r".*(_proj|lm_head)"),
    "both": lora(target_modules=["embed_tokens", "lm_head"]),
    "a saved head": lora(modules_to_save=["lm_head"]),
    "both saved": lora(modules_to_save=["lm_head", "embed_tokens"]),
    "tokens of the head": lora(trainable_token_indices={"lm_head": [3, 7, 400]}),
}
EMBEDDINGS = {
    "embedding": lora(target_modules=["embed_tokens"]),
    "embedding of stabilised rank": lora(target_modules=["embed_tokens"], use_rslora=True),
    "tokens": lora(trainable_token_indices=[3, 7, 400]),
    "tokens alone": TrainableTokensConfig(token_indices=[9, 2], target_modules=["embed_tokens"]),
}


@pytest.mark.parametrize("case", HEADS)
def test_rows_equal_the_merged_models(base, tmp_path, case):
    folder = adapter(base, tmp_path / "a", HEADS[case])
    expected = merged(base, folder)
    assert np.abs(expected - head_of(base)).max() > 0.1
    np.testing.assert_allclose(rows(folder, base), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", EMBEDDINGS)
def test_an_embedding_changes_the_rows_where_it_is_tied_and_nowhere_else(base, tied, tmp_path, case):
    folder = adapter(base, tmp_path / "a", EMBEDDINGS[case])
    expected = merged(base, folder)
    if tied:
        assert np.abs(expected - head_of(base)).max() > 0.1
        np.testing.assert_allclose(rows(folder, base), expected, atol=1e-6, rtol=1e-6)
    else:
        np.testing.assert_array_equal(expected, head_of(base))
        np.testing.assert_array_equal(rows(folder, base), expected)
        assert same_rows(notes(folder, base))


def logits(folder: Path, base: Path, state: torch.Tensor) -> np.ndarray:
    """What the unmerged model's head says of a state."""
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder)
    with torch.no_grad():
        return model.base_model.model.lm_head(state).numpy()


@pytest.mark.parametrize(
    "settings",
    [
        ENSURED,
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
)
def test_a_change_that_is_stored_under_both_names_of_a_matrix_counts_once(bases, tmp_path, settings):
    """As in the model that was trained: PEFT's merge adds it to the one matrix twice."""
    folder = adapter(bases[True], tmp_path / "a", lora(**settings))
    state = torch.randn(5, D, generator=torch.Generator().manual_seed(2))
    found = state.numpy() @ rows(folder, bases[True]).T
    np.testing.assert_allclose(found, logits(folder, bases[True], state), atol=1e-5)


def test_where_merging_changes_the_head_a_note_says_it(bases, tmp_path):
    state = torch.randn(5, D, generator=torch.Generator().manual_seed(2))
    note = "before it is merged, its head lacks that change"
    for case, settings in (HEADS | EMBEDDINGS | {"ensured": lora(**ENSURED)}).items():
        folder = adapter(bases[True], tmp_path / case, settings)
        found = state.numpy() @ rows(folder, bases[True]).T
        same = np.allclose(found, logits(folder, bases[True], state), atol=1e-5)
        assert same is not any(note in text for text in notes(folder, bases[True])), case
    folder = adapter(bases[False], tmp_path / "untied", HEADS["both"])
    assert notes(folder, bases[False]) == ()


def test_a_grown_vocabulary(base, tmp_path):
    model = LlamaForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(V + 6)
    grown = get_peft_model(model, lora())
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(0.5)
    grown.save_pretrained(tmp_path / "a", save_embedding_layers=True)
    found = rows(tmp_path / "a", base)
    assert found.shape == (V + 6, D)
    np.testing.assert_array_equal(found, model.get_output_embeddings().weight.detach().numpy())


@pytest.mark.parametrize("case", ["head of DoRA", "tokens of the head"])
def test_adapters_in_torchs_own_format(bases, tmp_path, case):
    folder = adapter(bases[False], tmp_path / "a", HEADS[case], bin_file=True)
    found = rows(folder, bases[False])
    again = adapter(bases[False], tmp_path / "b", HEADS[case])
    np.testing.assert_array_equal(found, rows(again, bases[False]))


def reported(*names: Any, **options: Any) -> Any:
    return screen([str(name) for name in names], **options)


def test_one_that_leaves_the_head_alone_is_level_with_its_base(base, tmp_path, capsys):
    folder = adapter(base, tmp_path / "attention", lora(target_modules=["q_proj", "v_proj"]))
    other = adapter(base, tmp_path / "head", HEADS["head"])
    result = reported(folder, base, other)
    assert not result.failed
    found = {Path(c.repo).name: c for c in result.checkpoints}
    level, plain = found["attention"], found[base.name]
    assert (level.gaps["cosine"].mean, level.rank) == (plain.gaps["cosine"].mean, plain.rank)
    assert level.tied_with == plain.tied_with
    assert level.notes == (f"same rows as its base {base}: G cannot tell them apart",)
    assert found["head"].gaps["cosine"].mean != plain.gaps["cosine"].mean
    assert main([str(folder), str(base), "--fail-if-below", str(base), "-q"]) == 0
    assert "same rows as its base" in capsys.readouterr().out


@pytest.mark.parametrize("own_tokenizer", [True, False])
def test_g_is_that_of_the_merged_folder(base, tmp_path, own_tokenizer):
    folder = adapter(base, tmp_path / "a", HEADS["head of DoRA"])
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder).merge_and_unload()
    model.save_pretrained(tmp_path / "merged")
    (tmp_path / "merged" / "tokenizer.json").write_bytes(TOKENIZER)
    if own_tokenizer:
        (folder / "tokenizer.json").write_bytes(TOKENIZER)
    result = reported(folder, tmp_path / "merged", base)
    assert not result.failed, result.failed
    found = {Path(c.repo).name: c for c in result.checkpoints}
    ours, theirs, plain = found["a"], found["merged"], found[base.name]
    assert ours.gaps["cosine"].mean == pytest.approx(theirs.gaps["cosine"].mean, abs=1e-6)
    assert ours.gaps["euclidean"].mean == pytest.approx(theirs.gaps["euclidean"].mean, abs=1e-5)
    assert abs(ours.gaps["cosine"].mean - plain.gaps["cosine"].mean) > 0.01
    assert (ours.scale, ours.family) == (theirs.scale, theirs.family)
    assert ours.ratio.mean == pytest.approx(theirs.ratio.mean, abs=1e-5)
    assert ours.file == FILE


def test_a_final_norm_that_the_adapter_changes_is_the_adapters(bases, tmp_path):
    async def norm(folder: Path) -> FinalNorm:
        projection = await projection_of(open_folder(folder), bases[False])
        return (await read_rows_and_norm(projection, [*T, *R]))[1]

    settings = lora(modules_to_save=["norm", "lm_head"])
    folder = adapter(bases[False], tmp_path / "a", settings)
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(bases[False]), folder)
    expected = model.merge_and_unload().model.norm.weight.detach().numpy()
    found = asyncio.run(norm(folder))
    assert found.kind == "rms"
    np.testing.assert_array_equal(found.weight, expected)
    assert not np.allclose(expected, 1), "the base's"
    plain = asyncio.run(norm(adapter(bases[False], tmp_path / "b", HEADS["head"])))
    np.testing.assert_array_equal(plain.weight, np.ones(D))


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("/home/me/models/base", "AdapterOnly", "a path on the machine that trained"),
        ("./base", "AdapterOnly", "a path on the machine that trained"),
        ("org/missing", "RepoNotFound", "org/missing"),
        (
            "org/adapter",
            "AdapterOnly",
            "its base org/adapter: cannot be screened because it holds only",
        ),
        (7, "BadConfig", "names no base"),
    ],
)
def test_bases_that_cannot_be_opened(hub, tmp_path, bases, monkeypatch, name, code, says):
    folder = adapter(bases[False], tmp_path / "a", HEADS["head"])
    edit(folder, base_model_name_or_path=name)
    hub.add("org/adapter", folder)
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(screening, "Hub", lambda **options: ours(hub, tmp_path / "cache"))
    (failed,) = reported("org/adapter").failed
    assert failed.error == code
    assert says in failed.message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which changes the base"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"peft_type": "VERA"}, "(VERA) that changes lm_head"),
        ({"alora_invocation_tokens": [1]}, "sets alora_invocation_tokens"),
        ({"use_qalora": True}, "sets use_qalora"),
        ({"use_dora": True}, "use_dora=True and not the magnitudes"),
        ({"lora_alpha": "six"}, "lora_alpha 'six'"),
        ({"alpha_pattern": {r"(\w+)+!": 3}}, "which is not followed"),
    ],
)
def test_what_is_another_method_is_refused_by_name(bases, tmp_path, changes, says):
    folder = adapter(bases[False], tmp_path / "a", HEADS["head"])
    edit(folder, **changes)
    error = refused(folder, bases[False])
    assert error.code == "AdapterOnly"
    assert says in str(error)
    assert "merge it into its base" in str(error)


@pytest.mark.parametrize(
    ("pattern", "applies"),
    [
        ("lm_head", True),
        ("^lm_head$", True),
        ("lm.head", True),
        ("head", False),
        ("lm_hea", False),
    ],
)
def test_patterns_apply_as_in_peft(bases, tmp_path, pattern, applies):
    from peft.utils.other import get_pattern_key

    # Without a match it returns the name itself.
    assert pattern == "lm_head" or (get_pattern_key([pattern], "lm_head") == pattern) is applies
    folder = adapter(bases[False], tmp_path / "a", HEADS["head"])
    plain = rows(folder, bases[False])
    edit(folder, alpha_pattern={pattern: 60})
    assert bool(np.abs(rows(folder, bases[False]) - plain).max() > 0.1) is applies


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("base_model.model.lm_head.lora_A.weight"), "lacks a factor of lm_head"),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, D + 1)}),
            f"factors for {V} × {D + 1} numbers",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_B.weight": torch.zeros(V, 5)}),
            "factors of ranks 4 and 5",
        ),
        (
            lambda t: t.update(
                {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, D, dtype=torch.int8)}
            ),
            "as I8 of shape",
        ),
        (lambda t: t.update({"base_model.model.lm_head.vera_lambda_b": torch.zeros(3, 3)}), "vera_lambda_b"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(bases, tmp_path, change, says):
    folder = adapter(bases[False], tmp_path / "a", HEADS["head"])
    tensors = load_file(folder / FILE)
    tensors.pop("base_model.model.lm_head.base_layer.weight")
    change(tensors)
    save_file(tensors, folder / FILE)
    error = refused(folder, bases[False])
    assert (error.code, says in str(error)) == ("AdapterOnly", True), error


def test_a_dora_of_a_tied_embedding_needs_every_row_and_is_refused(bases, tmp_path):
    folder = adapter(bases[True], tmp_path / "a", lora(target_modules=["embed_tokens"], use_dora=True))
    assert "whose lengths run over all rows" in str(refused(folder, bases[True]))


@pytest.mark.parametrize("indices", [[3, 7], [3, 3, 7], [3, 7, -1], [3, 7, V], {"wte": [3, 7, 8]}, None])
def test_tokens_that_do_not_fit_their_rows_are_refused(bases, tmp_path, indices):
    folder = adapter(bases[True], tmp_path / "a", EMBEDDINGS["tokens"])
    edit(folder, trainable_token_indices=indices)
    assert refused(folder, bases[True]).code == "AdapterOnly"


def test_an_adapter_without_the_stored_base_layer_is_read_from_the_base(base, tmp_path):
    folder = adapter(base, tmp_path / "a", HEADS["head"])
    tensors = load_file(folder / FILE)
    del tensors["base_model.model.lm_head.base_layer.weight"]
    save_file(tensors, folder / FILE)
    np.testing.assert_allclose(rows(folder, base), merged(base, folder), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("content", [b"[]", b"\xff"])
def test_a_broken_configuration_is_refused(bases, tmp_path, content):
    folder = adapter(bases[False], tmp_path / "a", HEADS["head"])
    (folder / "adapter_config.json").write_bytes(content)
    assert refused(folder, bases[False]).code == "BadConfig"


def test_what_a_training_leaves_beside_its_adapter_is_no_model(bases, tmp_path):
    folder = adapter(bases[False], tmp_path / "checkpoint-9", HEADS["a saved head"])
    plain = rows(folder, bases[False])
    for name in ("training_args.bin", "optimizer.bin", "optimizer.pt", "rng_state.pth", "scheduler.pt"):
        (folder / name).write_bytes(b"x")
    np.testing.assert_array_equal(rows(folder, bases[False]), plain)
    for name in ("model.safetensors", "pytorch_model.bin", "model-00001-of-00002.safetensors"):
        (folder / name).write_bytes(b"x")
        assert not is_adapter(open_folder(folder))
        (folder / name).unlink()
