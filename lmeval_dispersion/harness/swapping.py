"""Many adapters on one loaded base, with the answers of lm-eval's ``peft=ADAPTER``.

lm-eval loads the base anew for each adapter. Here PEFT takes the last LoRA off the loaded base and
puts the next one on. The embeddings are cut to the tokenizer's size, as lm-eval does for an adapter,
for the base too. Adapters that change the base itself (a saved head, biases, embeddings, other kinds
than LoRA), or that fail, are loaded whole.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import seams
from lmeval_dispersion.harness.adapters import downloaded
from lmeval_dispersion.model.loading import folder_digest

# Settings of a LoRA that leave the base as it is, where they are empty.
_CHANGING = ("modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters")
_LEAST_RANK = 16  # least LoRA rank for which vLLM makes room
# Modules for which vLLM makes room in any case, as most adapters have them.
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_INSTEAD = (
    "use the model hf, or merge the adapter into its base (merge_and_unload, save_pretrained)"
)
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
)


class SharedBase:
    """Loader of lm-eval's models that keeps the last one, so that adapters can share their base."""

    def __init__(self) -> None:
        self._lm: Any = None
        self._key = ""
        self._names = count(1)
        self._rank = _LEAST_RANK
        self._modules = set(_MODULES)

    def release(self) -> None:
        """Delete the model in memory, if there is one, and free its memory."""
        if self._lm is not None:
            self._lm = None
            self._key = ""
            seams.free_memory()

    def loaded(
        self, name: str, arguments: Mapping[str, Any], check: Callable[[Any], None], **settings: Any
    ) -> Any:
        """Return lm-eval's model for ``arguments``; a base that is in memory is not loaded again.

        Arguments and errors are those of :func:`seams.loaded_lm`; an adapter that vLLM cannot apply
        raises HarnessError, too. If the base of a LoRA is in memory, the LoRA replaces the previous
        LoRA on that base. An empty ``peft`` in ``arguments`` gives the shared base without an
        adapter; its embeddings are resized to the tokenizer, as lm-eval does for adapters.
        """
        given = downloaded(arguments)
        plain = {key: value for key, value in given.items() if key != "peft"}
        if name == "vllm" and "peft" in given:
            return self._engine(plain, given["peft"], check, settings)
        is_ours = "peft" in given and seams.backend(name) is seams.backend("hf")
        if not is_ours or not _leaves_the_base(given["peft"]):
            return self._load("", name, given if given.get("peft") else plain, check, settings)
        key = _key(plain, settings)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of libraries about each other
                if key == self._key:
                    check(self._lm)
                else:
                    _cut(self._load(key, name, plain, check, settings))
                with seams.refused_loads(adapter=bool(given["peft"])):
                    self._put_on(given["peft"])
        except (UsageError, HarnessError):  # the base is whole
            raise
        except Exception:  # PEFT may have left the base half changed
            return self._load("", name, given, check, settings)
        return self._lm

    def _load(
        self, key: str, name: str, arguments: Mapping[str, Any], check: Any, settings: Any
    ) -> Any:
        """A model in place of the last one; with ``key`` what is equal to it need not be loaded again."""
        self.release()
        self._lm = seams.loaded_lm(name, arguments, check, **settings)
        self._key = key
        return self._lm

    def _engine(
        self, plain: Mapping[str, Any], adapter: str, check: Callable[[Any], None], settings: Any
    ) -> Any:
        """A vLLM engine of the base, which applies the adapter to the next requests.

        It has room for the modules that adapters change, and not for the head: with that, vLLM's
        log-likelihoods of a prompt are wrong (its issue 51594), and on CPUs they fail.

        Raises:
            HarnessError: The adapter changes the head or is more than a LoRA, or vLLM cannot leave
                the head alone.
        """
        from vllm.lora.request import LoRARequest

        if not _leaves_the_base(adapter):
            raise HarnessError(
                "expected a plain LoRA in adapter_model.safetensors, the only kind of adapter that "
                f"vLLM applies, got {adapter}, which is of another type or format, or has biases "
                f"or saved modules; {_INSTEAD}"
            )
        modules = _modules(adapter)
        if "lm_head" in modules:
            raise HarnessError(
                f"the adapter changes lm_head, a change that vLLM ignores in log-likelihoods; {_INSTEAD}"
            )
        self._modules |= modules
        self._rank = max(self._rank, _rank(adapter))
        room = {
            **plain,
            "enable_lora": True,
            "max_lora_rank": self._rank,
            "lora_target_modules": sorted(self._modules),
        }
        key = _key(room, settings)
        if key != self._key:
            try:
                self._load(key, "vllm", room, check, settings)
            except TypeError as error:
                if "lora_target_modules" not in str(error):
                    raise
                raise HarnessError(
                    "this version of vLLM does not accept lora_target_modules, without which the "
                    "log-likelihoods of adapters are wrong; run `pip install -U vllm` (0.32 "
                    "accepts the setting), or use the model hf"
                ) from error
        number = next(self._names)  # by which vLLM knows what it has loaded
        self._lm.lora_request = LoRARequest(adapter, number, adapter) if adapter else None
        return self._lm

    def _put_on(self, adapter: str) -> None:
        from peft import PeftModel

        lm = self._lm
        model = lm._model
        lm.peft = adapter or None  # also of one that is refused: it has replaced the last
        if isinstance(model, PeftModel) and not adapter:
            lm._model = model.unload()
        elif adapter:
            fresh = f"adapter{next(self._names)}"
            if isinstance(model, PeftModel):
                before = model.active_adapter
                model.load_adapter(adapter, fresh)
                model.set_adapter(fresh)
                model.delete_adapter(before)
            else:
                lm._model = PeftModel.from_pretrained(model, adapter, adapter_name=fresh)
        lm._model.eval()  # PEFT leaves a loaded one in training


def _rank(adapter: str) -> int:
    """The power of two that holds an adapter's ranks; vLLM takes no other."""
    if not adapter:
        return _LEAST_RANK
    settings = _settings(adapter)
    most: int = max([settings.get("r", 1), *settings.get("rank_pattern", {}).values()])
    return max(_LEAST_RANK, 1 << (most - 1).bit_length())


def _modules(adapter: str) -> set[str]:
    """The last parts of the names of the modules that a LoRA changes."""
    if not adapter:
        return set()
    return {name.partition(".lora_")[0].rpartition(".")[2] for name in _tensors(adapter)}


def _leaves_the_base(folder: str) -> bool:
    """Whether an adapter, if any, is a LoRA whose tensors all are its own."""
    if not folder:
        return True
    try:
        settings = _settings(folder)
        own = all("lora_" in name for name in _tensors(folder))
    except Exception:  # loading it says why
        return False
    plain = settings.get("peft_type") == "LORA" and settings.get("bias", "none") == "none"
    return own and plain and not any(settings.get(name) for name in _CHANGING)


def _settings(folder: str) -> Any:
    """An adapter's configuration."""
    return json.loads((Path(folder) / "adapter_config.json").read_text("utf-8"))


def _tensors(folder: str) -> list[str]:
    """The names of an adapter's tensors."""
    from safetensors import safe_open

    with safe_open(Path(folder) / "adapter_model.safetensors", "numpy") as file:
        return list(file.keys())


def _key(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """A base's arguments and settings, a tokenizer's folder by its content: adapters store copies."""
    folder = Path(str(arguments.get("tokenizer", "")))
    if "tokenizer" in arguments and folder.is_dir():
        arguments = {**arguments, "tokenizer": folder_digest(folder, _TOKENIZER)}
    return json.dumps([arguments, settings], sort_keys=True, default=str)


def _cut(lm: Any) -> None:
    """Give the embeddings the tokenizer's size, as lm-eval does before it loads an adapter."""
    config = getattr(lm._model.config, "text_config", lm._model.config)
    if config.vocab_size != len(lm.tokenizer):
        lm._model.resize_token_embeddings(len(lm.tokenizer))
