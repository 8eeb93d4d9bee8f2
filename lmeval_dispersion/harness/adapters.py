"""PEFT adapters in lm-eval, which loads them by ``pretrained=BASE,peft=ADAPTER``.

lm-eval uses its one ``revision`` for both, so a Hub adapter is named with its commit and loaded from its
download folder.

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
    """The arguments, with an adapter ``REPOSITORY@COMMIT`` downloaded and replaced by its folder."""
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
    """Check that an adapter in the folder of whole weights is loaded with them.

    ``transformers_loads``: whether transformers is the backend's loader; versions before 5 do not load both.

    Raises:
        HarnessError: The backend would leave the adapter out, or load another base.
    """
    if arguments.get("gguf_file"):
        return
    if transformers_loads and int(transformers.__version__.partition(".")[0]) >= 5:
        return
    folder = Path(str(arguments.get("pretrained", "")))
    if (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise HarnessError(
            "an adapter lies in the folder of whole weights; model hf with transformers 5 or newer loads "
            "both, and this backend does not; install that, merge the adapter (merge_and_unload, "
            "save_pretrained), or move its files away"
        )


def answers_as_base(lm: Any, text: str) -> bool:
    """Whether lm-eval's model has an adapter that changes no logit on ``text``, by two forward passes."""
    if not getattr(lm, "peft", None) or lm.backend != "causal" or not isinstance(text, str):
        return False
    tokens = torch.tensor([lm.tok_encode(text)[-lm.max_length :]], device=lm.device)
    logits = lm._model_call(tokens)
    with lm.model.disable_adapter():
        return torch.equal(logits, lm._model_call(tokens))
