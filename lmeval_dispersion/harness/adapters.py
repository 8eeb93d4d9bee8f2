"""PEFT adapters in lm-eval, which loads them by ``pretrained=BASE,peft=ADAPTER``.

lm-eval uses one ``revision`` for both. So an adapter on the Hub is named with its commit, and loaded
from the folder to which it is downloaded.

An adapter in a folder with whole weights is part of the checkpoint: transformers loads both since
version 5.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.model.loading import ADAPTER, TEXTS


def downloaded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Download the adapter in ``--model_args`` if it is given as ``peft=REPOSITORY@COMMIT``.

    Returns a copy of the arguments in which the folder of the download replaces
    ``REPOSITORY@COMMIT``. If there is no such adapter, nothing is replaced.
    """
    from huggingface_hub import snapshot_download

    place = str(arguments.get("peft", ""))
    name, at, commit = place.partition("@")
    if not at or os.path.isdir(place):
        return dict(arguments)
    folder = snapshot_download(
        name, revision=commit, allow_patterns=[*ADAPTER, *TEXTS, "chat_template*"]
    )
    return {key: folder if value == place else value for key, value in arguments.items()}


def check_beside(arguments: Mapping[str, Any], *, transformers_loads: bool) -> None:
    """Check that an adapter in the same folder as a model's whole weights is loaded with them.

    Args:
        arguments: The ``--model_args``, parsed.
        transformers_loads: Whether the backend loads models with transformers, which loads weights
            and adapter together from version 5 on.

    Raises:
        HarnessError: The backend would ignore the adapter, or the folder's whole weights.
    """
    if arguments.get("gguf_file"):
        return
    if transformers_loads and int(transformers.__version__.partition(".")[0]) >= 5:
        return
    folder = Path(str(arguments.get("pretrained", "")))
    if (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise HarnessError(
            f"{folder} holds whole weights and an adapter, and this backend does not load both; use the "
            "model hf with transformers 5 or newer, merge the adapter (merge_and_unload, "
            "save_pretrained), or move the adapter's files away"
        )


def answers_as_base(lm: Any, text: str) -> bool:
    """Whether lm-eval's model has an adapter that does not change a single logit on ``text``.

    The model runs twice, with and without the adapter. False if there is no adapter, if the model
    is not decoder-only, or if ``text`` is not a string.
    """
    if not getattr(lm, "peft", None) or lm.backend != "causal" or not isinstance(text, str):
        return False
    tokens = torch.tensor([lm.tok_encode(text)[-lm.max_length :]], device=lm.device)
    logits = lm._model_call(tokens)
    with lm.model.disable_adapter():
        return torch.equal(logits, lm._model_call(tokens))
