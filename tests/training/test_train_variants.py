"""examples/train_variants.py: every variant trains, and forgetting resets what it says."""

import runpy
from pathlib import Path

import pytest
import torch
from tiny_decoders import tiny_gpt2, tokens

from lmeval_dispersion.paths import data_folder

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_variants.py"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", ["lora", "noise", "forgetting"])
def test_a_variant_trains_and_saves(variant, tmp_path, capsys):
    if variant == "lora":
        pytest.importorskip("peft")
    (tmp_path / "texts.txt").write_text("12 + 30 = 42, and 42 - 7 = 35.\n\nIt was late in the day.\n")
    EXAMPLE["main"](
        variant, data_folder("demo") / "sums-20", tmp_path / "texts.txt", str(tmp_path / "out"), steps=2
    )
    assert "'dispersion_loss': -" in capsys.readouterr().out
    saved = "adapter_model.safetensors" if variant == "lora" else "model.safetensors"
    assert (tmp_path / "out" / saved).is_file()


def test_active_forgetting_resets_rows_and_their_optimizer_state():
    model, ids = tiny_gpt2(), tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    weight = model.get_input_embeddings().weight
    before = weight.detach().clone()

    class State:
        global_step, max_steps = 3, 9

    callback = EXAMPLE["ActiveForgetting"](every=3, seed=1)
    callback.on_step_end(None, State(), None, model=model, optimizer=optimizer)
    first = weight.detach().clone()
    assert not torch.equal(first, before)
    assert float(first.std()) == pytest.approx(model.config.initializer_range, rel=0.2)
    assert not optimizer.state[weight]["exp_avg"].any()
    assert optimizer.state[model.transformer.h[0].mlp.c_fc.weight]["exp_avg"].any()
    for step in (4, 9):  # not its turn; the last step
        State.global_step = step
        callback.on_step_end(None, State(), None, model=model, optimizer=optimizer)
        assert torch.equal(weight, first)
