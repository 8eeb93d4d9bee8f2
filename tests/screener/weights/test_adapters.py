"""Adapters: rows equal PEFT's merged model, and one that changes no row is level with its base."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hub_client import refused, unread
from lmeval_screener import screen
from lmeval_screener.checkpoints.snapshot import open_folder
from lmeval_screener.cli import main
from lmeval_screener.weights.adapters.adapter import adapted_projection, is_adapter, read_adapter
from lmeval_screener.weights.projection import read_rows, read_rows_and_norm
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_figures import TOKENIZER, R, T, V
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore")
D = 16
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A tiny Llama on disk, untied and tied."""
    sizes = {"hidden_size": D, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    folders = {name: tmp_path_factory.mktemp("base") / name for name in ("untied", "tied")}
    for name, folder in folders.items():
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=V, tie_word_embeddings=name == "tied", **sizes, **heads)
        LlamaForCausalLM(config).save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes(TOKENIZER)
    return folders


@pytest.fixture(params=["untied", "tied"])
def base(request, bases):
    return bases[request.param]


@pytest.fixture
def untied(bases):
    return bases["untied"]


@pytest.fixture
def tied(bases):
    return bases["tied"]


def adapter(base, folder, settings, *, bin_file=False):
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


def lora(**settings):
    return LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], **settings})


def with_adapter(base, folder):
    """PEFT's model before merging."""
    return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder)


def head_of(model):
    return model.get_output_embeddings().weight.detach().numpy()


def merged(base, folder):
    """The output projection of PEFT's merged model."""
    return head_of(with_adapter(base, folder).merge_and_unload())


def projection_of(folder, base):
    async def work():
        snapshot = open_folder(folder)
        assert is_adapter(snapshot)
        return await adapted_projection(await read_adapter(snapshot), open_folder(base))

    return asyncio.run(work())


def rows(folder, base):
    projection = projection_of(folder, base)
    return asyncio.run(read_rows(projection, list(range(projection.shape[0]))))


def edit(folder, **changes):
    place = folder / "adapter_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))


HEADS = {
    "head": lora(target_modules=["lm_head"]),
    "head of stabilised rank": lora(target_modules=["lm_head"], use_rslora=True),
    "head of DoRA": lora(target_modules=["lm_head", "q_proj"], use_dora=True),
    "rank and alpha by pattern": lora(
        target_modules=["lm_head", "q_proj"],
        rank_pattern={"lm_head": 2},
        alpha_pattern={"lm_head": 9},
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


def same_before_merging(folder, base):
    """Whether the unmerged model's head says the same of some states as the rows do."""
    state = torch.randn(5, D, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        said = with_adapter(base, folder).base_model.model.lm_head(state).numpy()
    return np.allclose(state.numpy() @ rows(folder, base).T, said, atol=1e-5)


#: PEFT trains a copy of it: a head that is tied to it keeps the base's rows.
COPIES = {"a saved embedding": lora(modules_to_save=["embed_tokens"])}


@pytest.mark.parametrize("case", [*HEADS, *EMBEDDINGS, *COPIES])
def test_rows_equal_the_merged_models_and_an_embedding_changes_them_only_where_it_is_tied(
    base, tmp_path, case
):
    in_torchs_format = case in ("head of stabilised rank", "tokens of the head")
    folder = adapter(
        base, tmp_path / "a", (HEADS | EMBEDDINGS | COPIES)[case], bin_file=in_torchs_format
    )
    expected, before = merged(base, folder), head_of(LlamaForCausalLM.from_pretrained(base))
    np.testing.assert_allclose(rows(folder, base), expected, atol=1e-6, rtol=1e-6)
    same = case in COPIES or (case in EMBEDDINGS and base.name == "untied")
    assert bool(np.abs(expected - before).max() <= 0.1) is same
    assert not same or np.array_equal(rows(folder, base), before)
    notes = projection_of(folder, base).warnings
    assert any(note.startswith("same rows as its base ") for note in notes) is same
    # Where merging changes the head a note says so.
    changed_by_merging = any(
        "before merging, the head does not have that change" in note for note in notes
    )
    assert same_before_merging(folder, base) is not changed_by_merging
    assert len(notes) == same + changed_by_merging


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
    ],
)
def test_a_change_that_is_stored_under_both_names_of_a_matrix_counts_once(tied, tmp_path, settings):
    """As in the model that was trained: PEFT's merge adds it to the one matrix twice."""
    folder = adapter(tied, tmp_path / "a", lora(ensure_weight_tying=True, **settings))
    assert same_before_merging(folder, tied)
    assert not projection_of(folder, tied).warnings


def test_a_grown_vocabulary(base, tmp_path):
    model = LlamaForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(V + 6)
    grown = get_peft_model(model, lora())
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(0.5)
    grown.save_pretrained(tmp_path / "a", save_embedding_layers=True)
    found = rows(tmp_path / "a", base)
    assert found.shape == (V + 6, D)
    np.testing.assert_array_equal(found, head_of(model))


def test_g_is_that_of_the_merged_folder_or_level_with_the_bases(base, tmp_path, capsys):
    attention = adapter(base, tmp_path / "attention", lora(target_modules=["q_proj", "v_proj"]))
    head = adapter(base, tmp_path / "head", HEADS["head of DoRA"])
    with_adapter(base, head).merge_and_unload().save_pretrained(tmp_path / "merged")
    for folder in (head, tmp_path / "merged"):  # the other adapter has its base's
        (folder / "tokenizer.json").write_bytes(TOKENIZER)
    result = screen([str(place) for place in (attention, head, tmp_path / "merged", base)])
    assert not result.failed, result.failed
    found = {Path(c.repo).name: c for c in result.checkpoints}
    ours, theirs, level, plain = (
        found[name] for name in ("head", "merged", "attention", base.name)
    )
    for metric in ("cosine", "euclidean"):
        assert ours.gaps[metric].mean == pytest.approx(theirs.gaps[metric].mean, rel=1e-6)
    assert abs(ours.gaps["cosine"].mean - plain.gaps["cosine"].mean) > 0.01
    assert (ours.scale, ours.family, ours.file) == (theirs.scale, theirs.family, FILE)
    assert ours.ratio.mean == pytest.approx(theirs.ratio.mean, abs=1e-5)
    assert (level.gaps["cosine"].mean, level.rank) == (plain.gaps["cosine"].mean, plain.rank)
    assert level.equals == plain.label or plain.equals == level.label
    assert level.notes == (
        f"same rows as its base {base}: the screen cannot rank one above the other",
    )
    assert main([str(attention), str(base), "--fail-if-below", str(base), "-q"]) == 0
    assert "same rows as its base" in capsys.readouterr().out


def test_a_final_norm_that_the_adapter_changes_is_the_adapters(untied, tmp_path):
    def norm(folder):
        return asyncio.run(read_rows_and_norm(projection_of(folder, untied), [*T, *R]))[1]

    folder = adapter(untied, tmp_path / "a", lora(modules_to_save=["norm", "lm_head"]))
    expected = with_adapter(untied, folder).merge_and_unload().model.norm.weight.detach().numpy()
    assert norm(folder).kind == "rms"
    np.testing.assert_array_equal(norm(folder).weight, expected)
    assert not np.allclose(expected, 1), "the base's"
    plain = norm(adapter(untied, tmp_path / "b", HEADS["head"]))
    np.testing.assert_array_equal(plain.weight, np.ones(D))


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("/home/me/models/base", "AdapterOnly", "a path on the machine that trained"),
        ("org/missing", "BaseNotFound", "org/missing"),
        (
            "org/adapter",
            "AdapterOnly",
            "its base org/adapter: cannot be screened because it holds only",
        ),
        (7, "BadConfig", "does not name the base"),
    ],
)
def test_bases_that_cannot_be_opened(hub, tmp_path, untied, monkeypatch, name, code, says):
    folder = adapter(untied, tmp_path / "a", HEADS["head"])
    edit(folder, base_model_name_or_path=name)
    hub.add("org/adapter", folder)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    unread("org/adapter", code, says)


def test_an_adapter_costs_what_its_own_files_and_its_bases_do(hub, tmp_path, untied, monkeypatch):
    folder = adapter(untied, tmp_path / "a", HEADS["head"])
    edit(folder, base_model_name_or_path="org/base")
    hub.add("org/adapter", folder)
    hub.add("org/base", untied)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    result = screen(["org/adapter", "org/base"])
    assert sum(c.requests for c in result.checkpoints) == result.requests == len(hub.requests)
    assert sum(c.bytes_read for c in result.checkpoints) == result.bytes_read


def of_base(base, folder, name, **settings):
    """An adapter whose configuration names another base."""
    adapter(base, folder, lora(**settings))
    edit(folder, base_model_name_or_path=name)
    return folder


def test_adapters_that_leave_the_head_alone_need_no_base(
    untied, tmp_path, hub, monkeypatch, capsys
):
    """It is asked for once, nothing has failed, and the answer has the condition."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    folders = [of_base(untied, tmp_path / "run" / str(i), "org/missing") for i in range(5)]
    result = screen([str(folder) for folder in folders])
    assert (result.failed, result.checkpoints, result.exit_code) == ((), (), 0)
    assert {f.error for f in result.of_base} == {"RowsOfBase"}
    assert {f.base for f in result.of_base} == {"org/missing"}
    assert len(hub.requests) == 1
    first, cause, step = result.answer()
    assert first.startswith("Nothing to rank: ")
    assert "(org/missing) if their tensor names fit that base" in first
    assert "org/missing" in cause
    assert step.startswith(f"Compare their answers: `dispersion race {tmp_path / 'run'} ")
    step = screen([str(folders[0])]).answer()[-1]
    assert "its base" in step
    assert f"`dispersion race {folders[0]} org/missing --tasks TASK`" in step
    words = [*map(str, folders)]
    assert main(words) == 0
    assert "Nothing to rank: " in capsys.readouterr().out
    for options in (["--format", "csv"], ["--shortlist", "2"]):
        assert main([*words, *options]) == 0
        assert "Nothing to rank: " in capsys.readouterr().err
    assert main([*words, "--fail-if-below", words[0]]) == 1
    assert "cannot be judged" in capsys.readouterr().out
    for status in (0, 0):
        assert main([*words, "--registry", str(tmp_path / "r.db"), "--since", "last"]) == status
        assert "ailing" not in capsys.readouterr().out


def test_of_an_unreadable_base_only_adapters_that_change_the_head_fail(
    untied, tmp_path, hub, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    body = of_base(untied, tmp_path / "body", "org/missing")
    head = of_base(untied, tmp_path / "head", "org/missing", target_modules=["lm_head"])
    norm = of_base(untied, tmp_path / "norm", "org/missing", modules_to_save=["norm"])
    embedding = of_base(
        untied, tmp_path / "embedding", "org/missing", target_modules=["embed_tokens"]
    )
    result = screen([str(place) for place in (body, head, norm, embedding, untied)])
    assert [f.label for f in result.of_base] == ["body"]
    assert {f.label: f.error for f in result.failed} == dict.fromkeys(
        ("head", "norm", "embedding"), "BaseNotFound"
    )
    assert len(result.checkpoints) == 1
    assert result.exit_code == 3
    assert any(
        "body has the output rows of its base (org/missing)" in text for text in result.answer()
    )


def test_a_race_of_adapters_without_a_readable_base_asks_all(untied, tmp_path, hub, monkeypatch):
    from lmeval_dispersion.racing.arguments import Which
    from lmeval_dispersion.racing.lineup import Named, lineup

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    for name in ("a", "b"):
        of_base(untied, tmp_path / "run" / name, "org/missing")
    named = Named.of(str(tmp_path / "run"))
    taken = lineup(named, "gsm8k", Which(domain="math"), api=False, count=lambda: (None, 0))
    assert [(entry.label, entry.chosen) for entry in taken.entries] == [
        ("a", "named"),
        ("b", "named"),
    ]


def test_in_a_race_an_adapter_without_a_readable_base_fails_next_to_others(
    untied, tmp_path, hub, monkeypatch
):
    from lmeval_dispersion.racing.arguments import Which
    from lmeval_dispersion.racing.lineup import Named, lineup

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    for name, base in (("a", str(untied)), ("b", "org/missing")):
        of_base(untied, tmp_path / "run" / name, base)
    named = Named.of(str(tmp_path / "run"))
    taken = lineup(named, "gsm8k", Which(domain="math"), api=False, count=lambda: (None, 0))
    assert [entry.label for entry in taken.entries] == ["a"]
    (failed,) = taken.failed
    assert failed.label == "b"
    assert "org/missing" in failed.message


def test_of_a_repository_with_an_adapter_and_whole_weights_the_named_base_is_read(
    hub, tmp_path, untied, tied, monkeypatch
):
    """transformers takes the weights next to an adapter from a folder alone."""
    folder = of_base(untied, tmp_path / "a", "org/base", target_modules=["lm_head"])
    other = LlamaForCausalLM.from_pretrained(tied)
    other.save_pretrained(folder)
    hub.add("org/adapter", folder)
    hub.add("org/base", untied)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    (found,) = screen(["org/adapter"]).checkpoints
    assert found.base == "org/base"
    assert not found.tied
    assert any("weights next to adapter_model.safetensors were not read" in n for n in found.notes)


def test_an_adapter_beside_whole_weights_makes_another_body_unless_it_changes_nothing(
    untied, tmp_path
):
    """Rows alone do not show a LoRA of the attention: only the body does."""
    places = {}
    for name, settings in (("whole", None), ("trained", {}), ("at zero", {"lora_alpha": 0})):
        places[name] = tmp_path / name
        LlamaForCausalLM.from_pretrained(untied).save_pretrained(places[name])
        (places[name] / "tokenizer.json").write_bytes(TOKENIZER)
        if settings is not None:
            adapter(untied, places[name], lora(**settings))
    found = {
        Path(c.repo).name: c for c in screen([str(place) for place in places.values()]).checkpoints
    }
    assert found["at zero"].copy_of or found["whole"].copy_of
    assert found["trained"].copy_of is None
    assert found["trained"].equal_rows_with is not None


def test_ranks_that_the_configuration_contradicts_are_refused_as_peft_does(untied, tmp_path):
    folder = adapter(untied, tmp_path / "a", HEADS["head"])
    edit(folder, r=8)
    with pytest.raises(RuntimeError, match="size mismatch"):
        with_adapter(untied, folder)
    refused(rows, folder, untied, code="AdapterOnly", says="factors of rank 4 for lm_head")


def test_a_prompt_beside_whole_weights_is_refused_as_transformers_refuses_it(untied, tmp_path):
    from peft import PromptTuningConfig

    folder = tmp_path / "m"
    model = LlamaForCausalLM.from_pretrained(untied)
    model.save_pretrained(folder)
    settings = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    get_peft_model(model, settings).save_pretrained(folder)
    with pytest.raises(ValueError, match="prompt learning"):
        AutoModelForCausalLM.from_pretrained(folder)
    unread(str(folder), "AdapterOnly", "PROMPT_TUNING")


TOKENS_LEFT_OPEN = "but not a token id of its own for each row"


@pytest.mark.parametrize(
    ("settings", "changes", "says"),
    [
        (
            HEADS["head"],
            {"init_lora_weights": "pissa"},
            "init_lora_weights='pissa', which changes the base",
        ),
        (HEADS["head"], {"peft_type": "VERA"}, "(VERA) that changes lm_head"),
        (HEADS["head"], {"alora_invocation_tokens": [1]}, "sets alora_invocation_tokens"),
        (HEADS["head"], {"use_qalora": True}, "sets use_qalora"),
        (HEADS["head"], {"use_dora": True}, "use_dora=True, which contradicts"),
        (HEADS["head"], {"lora_alpha": "six"}, 'lora_alpha "six"'),
        (HEADS["head"], {"alpha_pattern": {r"(\w+)+!": 3}}, "which is not supported"),
        (
            lora(target_modules=["embed_tokens"], use_dora=True),
            {},
            "so that every row depends on all other rows",
        ),
        (EMBEDDINGS["tokens"], {"trainable_token_indices": [3, 7]}, TOKENS_LEFT_OPEN),
        (EMBEDDINGS["tokens"], {"trainable_token_indices": [3, 3, 7]}, TOKENS_LEFT_OPEN),
        (EMBEDDINGS["tokens"], {"trainable_token_indices": [3, 7, -1]}, TOKENS_LEFT_OPEN),
        (EMBEDDINGS["tokens"], {"trainable_token_indices": {"wte": [3, 7, 8]}}, TOKENS_LEFT_OPEN),
        (EMBEDDINGS["tokens"], {"trainable_token_indices": None}, TOKENS_LEFT_OPEN),
        (EMBEDDINGS["tokens"], {"trainable_token_indices": [3, 7, V]}, "rows that do not fit"),
    ],
)
def test_what_is_another_method_or_does_not_fit_is_refused_by_name(
    tied, tmp_path, settings, changes, says
):
    folder = adapter(tied, tmp_path / "a", settings)
    edit(folder, **changes)
    error = refused(rows, folder, tied, code="AdapterOnly", says=says)
    steps = ("merge it into its base", "save it again", "save the adapter again")
    assert any(step in str(error) for step in steps)


@pytest.mark.parametrize(
    ("pattern", "applies"),
    [("lm_head", True), ("^lm_head$", True), ("lm.head", True), ("head", False)],
)
def test_patterns_apply_as_in_peft(untied, tmp_path, pattern, applies):
    from peft.utils.other import get_pattern_key

    # Without a match it returns the name itself.
    assert pattern == "lm_head" or (get_pattern_key([pattern], "lm_head") == pattern) is applies
    folder = adapter(untied, tmp_path / "a", HEADS["head"])
    plain = rows(folder, untied)
    edit(folder, alpha_pattern={pattern: 60})
    assert bool(np.abs(rows(folder, untied) - plain).max() > 0.1) is applies


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("lora_A.weight", None, "lacks one of the two factors of lm_head"),
        ("lora_A.weight", torch.zeros(4, D + 1), f"for a matrix of {V} × {D + 1}"),
        ("lora_B.weight", torch.zeros(V, 5), "factors of ranks 4 and 5"),
        ("lora_A.weight", torch.zeros(4, D, dtype=torch.int8), "as I8 of shape"),
        ("vera_lambda_b", torch.zeros(3, 3), "vera_lambda_b"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(untied, tmp_path, name, tensor, says):
    folder = adapter(untied, tmp_path / "a", HEADS["head"])
    stem = "base_model.model.lm_head."
    tensors = load_file(folder / FILE)
    # Without the stored base layer an adapter is read from its base.
    del tensors[f"{stem}base_layer.weight"]
    save_file(tensors, folder / FILE)
    np.testing.assert_allclose(rows(folder, untied), merged(untied, folder), atol=1e-6, rtol=1e-6)
    tensors[f"{stem}{name}"] = tensor
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / FILE
    )
    refused(rows, folder, untied, code="AdapterOnly", says=says)


def test_magnitudes_for_another_number_of_rows_are_refused(untied, tmp_path):
    folder = adapter(untied, tmp_path / "a", lora(target_modules=["lm_head"], use_dora=True))
    stem = "base_model.model.lm_head."
    tensors = load_file(folder / FILE)
    tensors.pop(f"{stem}base_layer.weight", None)
    tensors[f"{stem}lora_magnitude_vector"] = torch.ones(V - 1)
    save_file(tensors, folder / FILE)
    says = f"DoRA magnitudes of shape {V - 1} × 1, where {V} × 1 is expected"
    refused(rows, folder, untied, code="AdapterOnly", says=says)


def test_what_a_training_leaves_beside_its_adapter_is_no_model(untied, tmp_path):
    folder = adapter(untied, tmp_path / "checkpoint-9", HEADS["a saved head"])
    plain = rows(folder, untied)
    for name in (
        "training_args.bin",
        "optimizer.bin",
        "optimizer.pt",
        "rng_state.pth",
        "scheduler.pt",
    ):
        (folder / name).write_bytes(b"x")
    np.testing.assert_array_equal(rows(folder, untied), plain)
    for name in ("model.safetensors", "pytorch_model.bin", "model-00001-of-00002.safetensors"):
        (folder / name).write_bytes(b"x")
        assert not is_adapter(open_folder(folder))
        (folder / name).unlink()
    for content in (b"[]", b"\xff"):
        (folder / "adapter_config.json").write_bytes(content)
        assert refused(rows, folder, untied).code == "BadConfig"
