"""Adapters as PEFT saves them, with real skill: low-rank parts of the difference of two bundled models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from lmeval_dispersion.installation import data_folder

DEMO = data_folder("demo")
BASE, RANK = DEMO / "sums-20", 96
PARTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(
    folder: Path,
    share: float = 1.0,
    *,
    name: str | None = None,
    **settings: Any,
) -> Path:
    """The folder, with an adapter that takes a share of the way of the base's blocks to a better model.

    ``name`` is that of the base in its configuration, which is PEFT's with these settings.
    """
    model = AutoModelForCausalLM.from_pretrained(BASE)
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, **{"target_modules": PARTS, **settings})
    adapted = peft.get_peft_model(model, config)
    for module, part in adapted.base_model.model.named_modules():
        if hasattr(part, "lora_B") and share:
            u, s, v = _way(module)
            rank = part.r["default"]
            part.lora_A["default"].weight.data = v[:rank].clone()
            part.lora_B["default"].weight.data = share * u[:, :rank] * s[:rank]
    adapted.save_pretrained(folder)
    settings_file = folder / "adapter_config.json"
    content = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps(content | {"base_model_name_or_path": name or str(BASE)}))
    return folder


@cache
def _way(module: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The difference of both models' weights in a module, by its singular values."""
    here, there = (
        _weights(place)[f"{module}.weight"].data.float() for place in (BASE, DEMO / "sums-80")
    )
    return torch.linalg.svd(there - here)


@cache
def _weights(place: Path) -> dict[str, torch.nn.Parameter]:
    return dict(AutoModelForCausalLM.from_pretrained(place).named_parameters())
