"""Many adapters on one loaded base, with the answers of lm-eval's ``peft=ADAPTER``.

lm-eval loads the base anew for each adapter. Here PEFT takes the last LoRA off the loaded base and puts the
next one on. The embeddings are cut to the tokenizer's size, as lm-eval does for an adapter, for the base too.
Adapters that change the base itself (a saved head, biases, embeddings, other kinds than LoRA), or that fail,
are loaded whole.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import DispersionError
from lmeval_dispersion.harness import seams
from lmeval_dispersion.harness.adapters import check_placed, check_reaches, downloaded

# Settings of a LoRA that leave the base as it is, where they are empty.
_CHANGING = ("modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters")
_LEAST_RANK = 16  # least LoRA rank for which vLLM makes room
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")


class SharedBase:
    """Loads models in turn, holding one; adapters of one base share it."""

    def __init__(self) -> None:
        self._lm: Any = None
        self._key, self._names = "", count()
        self._rank = _LEAST_RANK

    def release(self) -> None:
        """Free the held model's memory."""
        self._lm, self._key = None, ""
        seams.free_memory()

    def loaded(
        self, name: str, arguments: Mapping[str, Any], check: Callable[[Any], None], **settings: Any
    ) -> Any:
        """As :func:`seams.loaded_lm`; an empty ``peft`` asks for the base that adapters share."""
        given = downloaded(arguments)
        plain = {key: value for key, value in given.items() if key != "peft"}
        if name == "vllm" and "peft" in given:
            return self._engine(plain, given["peft"], check, settings)
        if (
            "peft" not in given
            or seams.backend(name) is not seams.backend("hf")
            or not _leaves_the_base(given["peft"])
        ):
            self.release()
            return seams.loaded_lm(name, given if given.get("peft") else plain, check, **settings)
        key = json.dumps([_identified(plain), settings], sort_keys=True, default=str)

        base = str(plain["pretrained"])

        def checked(lm: Any) -> None:
            check(lm)
            swapped = lm is self._lm and lm.peft  # PEFT says then which tensors it could not place
            if given["peft"] and not swapped:
                check_reaches(lm, base, given["peft"])

        try:
            if key == self._key:
                checked(self._lm)
            else:
                self.release()
                self._lm, self._key = seams.loaded_lm(name, plain, checked, **settings), key
                _cut(self._lm)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of libraries about each other
                self._put_on(given["peft"], base)
        except DispersionError:
            raise
        except Exception:  # PEFT may have left the base half changed
            self.release()
            return seams.loaded_lm(name, given, check, **settings)
        return self._lm

    def _engine(
        self, plain: Mapping[str, Any], adapter: str, check: Callable[[Any], None], settings: Any
    ) -> Any:
        """A vLLM engine of the base, which applies the adapter to the next requests.

        Experimental: written by vLLM's source, and never run on it.
        """
        from vllm.lora.request import LoRARequest

        self._rank = max(self._rank, _rank(adapter))
        key = json.dumps([_identified(plain), self._rank, settings], sort_keys=True, default=str)
        if key != self._key:
            self.release()
            room = {"enable_lora": True, "max_lora_rank": self._rank}
            self._lm, self._key = seams.loaded_lm("vllm", {**plain, **room}, check, **settings), key
        number = next(self._names) + 1  # by which vLLM knows what it has loaded
        self._lm.lora_request = LoRARequest(adapter, number, adapter) if adapter else None
        return self._lm

    def _put_on(self, adapter: str, base: str) -> None:
        from peft import PeftModel

        lm, model = self._lm, self._lm._model
        if isinstance(model, PeftModel) and not adapter:
            lm._model = model.unload()
        elif adapter:
            fresh = f"adapter{next(self._names)}"
            if isinstance(model, PeftModel):
                before = model.active_adapter
                unplaced = model.load_adapter(adapter, fresh).unexpected_keys
                model.set_adapter(fresh)
                model.delete_adapter(before)
                check_placed(model, base, _tensors(adapter), unplaced)
            else:
                lm._model = PeftModel.from_pretrained(model, adapter, adapter_name=fresh)
        lm._model.eval()  # PEFT leaves a loaded one in training
        lm.peft = adapter or None


def _rank(adapter: str) -> int:
    """The power of two that holds an adapter's ranks; vLLM takes no other."""
    if not adapter:
        return _LEAST_RANK
    settings = json.loads((Path(adapter) / "adapter_config.json").read_text("utf-8"))
    most: int = max([settings.get("r", 1), *settings.get("rank_pattern", {}).values()])
    return max(_LEAST_RANK, 1 << (most - 1).bit_length())


def _leaves_the_base(folder: str) -> bool:
    """Whether an adapter, if any, is a LoRA whose tensors all are its own."""
    if not folder:
        return True
    try:
        settings = json.loads((Path(folder) / "adapter_config.json").read_text("utf-8"))
        own = all("lora_" in name for name in _tensors(folder))
    except Exception:  # loading it says why
        return False
    plain = settings.get("peft_type") == "LORA" and settings.get("bias", "none") == "none"
    return own and plain and not any(settings.get(name) for name in _CHANGING)


def _tensors(folder: str) -> list[str]:
    """The names of an adapter's tensors."""
    from safetensors import safe_open

    with safe_open(Path(folder) / "adapter_model.safetensors", "numpy") as file:
        return list(file.keys())


def _identified(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A base's arguments, with a tokenizer's folder replaced by its content: adapters store copies."""
    folder = Path(str(plain.get("tokenizer", "")))
    if "tokenizer" not in plain or not folder.is_dir():
        return dict(plain)
    digest = hashlib.sha256()
    for name in _TOKENIZER:
        digest.update((folder / name).read_bytes() if (folder / name).is_file() else b"none")
    return {**plain, "tokenizer": digest.hexdigest()}


def _cut(lm: Any) -> None:
    """Give the embeddings the tokenizer's size, as lm-eval does before it loads an adapter."""
    config = getattr(lm._model.config, "text_config", lm._model.config)
    if config.vocab_size != len(lm.tokenizer):
        lm._model.resize_token_embeddings(len(lm.tokenizer))
