"""Models as large ones are run: over processes and devices, compiled, in few bits, with experts and eyes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from harness_world import (
    check_vectors,
    evaluate,
    hflm,
    records,
    tiny_llama,
)

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.model.loading import load_model

pytestmark = pytest.mark.usefixtures("in_world")

HERE = Path(__file__).resolve().parent


def hooks(model: torch.nn.Module) -> list[Any]:
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return [hook for part in model.modules() for kind in kinds for hook in getattr(part, kind).values()]


@pytest.mark.parametrize("how", [pytest.param("wrapped", marks=pytest.mark.slow), "in place"])
def test_compiled_models_give_their_states(
    how: str, tokenizer: Any, task_manager: Callable[..., Any]
) -> None:
    model = tiny_llama(tokenizer)
    run: Any = model
    if how == "wrapped":
        run = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    run(torch.tensor([[1, 2, 3]]))  # compiled before anything is hooked
    lm = hflm(run, tokenizer)
    for _ in range(2):
        results = evaluate(lm, ["arc_easy_dispersion"], task_manager(), limit=3)
        # The check asks for hidden states, and transformers leaves hooks of its own for that.
        assert {hook.__module__ for hook in hooks(model)} <= {"transformers.utils.output_capturing"}
        check_vectors(lm, results, "arc_easy_dispersion")


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_weights_in_few_bits_give_their_own_states(
    bits: str, tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path
) -> None:
    # The 4-bit kernel of the CPU takes widths that are multiples of 64 only.
    model = tiny_llama(tokenizer, hidden_size=64, intermediate_size=128)
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    loaded = load_model(tmp_path / "plain", quantize=bits, device="cpu")  # type: ignore[arg-type]
    loaded.model.save_pretrained(tmp_path / "few")
    tokenizer.save_pretrained(tmp_path / "few")
    lm = hflm(str(tmp_path / "few"), None, device="cpu", dtype="float32", batch_size=1, max_length=512)
    part = lm.model.model.layers[0].mlp.up_proj
    assert "bit" in type(part).__name__
    results = evaluate(lm, ["arc_easy_dispersion"], task_manager(), limit=3)
    if bits == "8bit":
        # Columns with an outlier in any token of a pass stay in 16 bits for all of its tokens: a state
        # depends a little on the answer behind it, which the prompt alone does not have.
        assert part.state.threshold == 6.0
        check_vectors(lm, results, "arc_easy_dispersion", within=0.05)
    else:
        check_vectors(lm, results, "arc_easy_dispersion")
    plain = hflm(model, tokenizer, batch_size=1, max_length=512)
    ours, theirs = (
        np.concatenate([r.state.vectors["last"] for r in records(found, "arc_easy_dispersion")])
        for found in (results, evaluate(plain, ["arc_easy_dispersion"], task_manager(), limit=3))
    )
    assert 0.001 < np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 1.0  # not the plain one's


@pytest.fixture(scope="module")
def seeing_model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with its processor as a folder."""
    torch.manual_seed(0)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = tiny_llama(tokenizer).config
    eye = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = transformers.LlavaConfig(
        vision_config=eye, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<image>")
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    folder = tmp_path_factory.mktemp("models") / "llava"
    model.save_pretrained(folder)
    transformers.LlavaProcessor(images, tokenizer, patch_size=14).save_pretrained(folder)
    return folder


def test_models_with_eyes_read_texts(seeing_model: Path, task_manager: Callable[..., Any]) -> None:
    from lm_eval.models.hf_vlms import HFMultimodalLM

    lm = HFMultimodalLM(str(seeing_model), device="cpu", dtype="float32", batch_size=3, max_length=512)
    results = evaluate(lm, ["arc_easy_dispersion"], task_manager(), limit=4)
    check_vectors(lm, results, "arc_easy_dispersion")
    from lmeval_dispersion.harness.records import Prompt

    arguments = ("<image> What is it?", {"until": ["\n"], "max_gen_toks": 4}, {"visual": [None]})
    for kind in ("loglikelihood", "generate_until"):
        with pytest.raises(HarnessError, match="t has images in its prompts, whose states cannot be kept"):
            getattr(lm, f"dispersion_{kind}")([Prompt(arguments, None, "t", ("last",))])
