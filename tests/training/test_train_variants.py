"""examples/train_variants.py: every variant trains, and forgetting resets what it says."""

import runpy
from pathlib import Path

import pytest

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
