"""PEFT adapters in lm-eval, which loads them by ``pretrained=BASE,peft=ADAPTER``.

lm-eval uses its one ``revision`` for both, so a Hub adapter is named with its commit and loaded from its
download folder. PEFT leaves out tensors that fit no module of the base without a warning: the model then
answers as its base.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.model.loading import ADAPTER, TEXTS


def downloaded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with an adapter ``REPOSITORY@COMMIT`` downloaded and replaced by its folder."""
    from huggingface_hub import snapshot_download

    place = str(arguments.get("peft", ""))
    name, at, commit = place.partition("@")
    if not at or os.path.isdir(place):
        return dict(arguments)
    folder = snapshot_download(name, revision=commit, allow_patterns=[*ADAPTER, *TEXTS, "chat_template*"])
    return {key: folder if value == place else value for key, value in arguments.items()}


def check_reaches(lm: Any, base: str, folder: str) -> None:
    """Check, before lm-eval's model has weights, that some tensor of an adapter fits it.

    Raises:
        HarnessError: All tensors have other names than the base's modules.
    """
    import peft

    try:
        with torch.device("meta"):
            plain = lm.AUTO_MODEL_CLASS.from_config(lm.config)
            model = peft.PeftModel(plain, peft.PeftConfig.from_pretrained(folder), low_cpu_mem_usage=True)
        tensors = peft.load_peft_weights(folder, device="cpu")
        result = peft.set_peft_model_state_dict(model, tensors, low_cpu_mem_usage=True)
    except Exception:  # where that fails, loading says why
        return
    check_placed(model, base, tensors, result.unexpected_keys)


def check_placed(model: Any, base: str, tensors: Collection[str], unexpected: Collection[str]) -> None:
    """Check that PEFT placed some of an adapter's ``tensors``: not all of them are ``unexpected``.

    Raises:
        HarnessError: All tensors have other names than the base's modules.
    """
    import peft

    if len(unexpected) < len(tensors):
        return
    theirs, ours = (
        re.sub(r"^base_model\.model\.|\.(lora|modules_to_save)\w*\..*", "", min(names, default="none"))
        for names in (tensors, peft.get_peft_model_state_dict(model, adapter_name=model.active_adapter))
    )
    raise HarnessError(
        f"none of the adapter's {len(tensors)} tensors belongs to a module of its base {base}: it "
        f"names {theirs}, the base has {ours}; write the base that it was trained on into "
        "adapter_config.json, or save it again"
    )


def answers_as_base(lm: Any, text: str) -> bool:
    """Whether lm-eval's model has an adapter that changes no logit on ``text``, by two forward passes."""
    if not getattr(lm, "peft", None) or lm.backend != "causal" or not isinstance(text, str):
        return False
    tokens = torch.tensor([lm.tok_encode(text)[-lm.max_length :]], device=lm.device)
    logits = lm._model_call(tokens)
    with lm.model.disable_adapter():
        return torch.equal(logits, lm._model_call(tokens))
