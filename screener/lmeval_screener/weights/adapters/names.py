"""Which modules an adapter's tensors change, and whether its base has them, by names alone.

PEFT stores a change under the name of the module in the base's class, behind ``base_model.model.``,
and leaves out, with a warning at most, what fits no module (peft 0.21,
``set_peft_model_state_dict``). A checkpoint's stored names are those of its class, with these
exceptions: the class's own prefix may be missing (GPT-2 as published), and transformers 5 renames
modules of wrappers, of experts and of some architectures, in the base and in LoRAs alike. There
only what no loader takes off a name counts: names cannot tell what fits.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from functools import cached_property

from lmeval_screener.weights.architectures import EMBEDDINGS, HEADS, PEFT_WORDS, TABLES, WRAPPERS

#: What PEFT puts before the name of a module.
PREFIX = "base_model.model."
#: Most words of a tensor's name, and most characters, that are looked at: names of modules are far shorter.
_WORDS = 40
_LENGTH = 1000
_HEAD_MODULES = frozenset(name.removesuffix(".weight") for name in HEADS)
_EMBEDDING_MODULES = tuple(name.removesuffix(".weight") for name in EMBEDDINGS)
#: What classes for causal language models call the model below their head, likeliest first.
_CLASS_PREFIXES = ("model.", "transformer.", "gpt_neox.", "backbone.", "rwkv.", "biogpt.")
#: First words of names that hold a language model inside a larger one.
_WRAPPER_WORDS = frozenset(".".join((*WRAPPERS, "transformer")).split("."))
#: Parts of first words that belong to other parts of a larger model.
_TOWERS = re.compile("vision|visual|audio|speech|talker")
#: Architectures, by ``model_type``, whose modules transformers 5.24 calls otherwise than their files do.
_RENAMED = frozenset(TABLES["renamed"].split())
#: Mistakes in saving: what an adapter's names have too much, or lack, and how that comes about.
_SURPLUS = {
    PREFIX: "get_peft_model was called on a PEFT model",
    "_orig_mod.": "the adapter was saved from a compiled model",
    "module.": "the adapter was saved from a model inside DDP",
    "_fsdp_wrapped_module.": "the adapter was saved from a model inside FSDP",
}


def words_of(name: str) -> list[str]:
    """Split the first 1000 characters of a tensor's name at the dots, into at most 40 words."""
    return name[:_LENGTH].split(".")[:_WORDS]


def module_of(name: str) -> str:
    """Return the name of the module that an adapter's tensor changes.

    The name is empty for a tensor of the whole adapter, such as a prompt. The prefix
    ``base_model.model.`` is removed once; a second one stays, and so does another program's prefix.

    >>> module_of("base_model.model.lm_head.lora_A.weight")
    'lm_head'
    """
    words = words_of(name.removeprefix(PREFIX))
    if words[0] == "base_model" and len(words) == 2:
        return ""  # shared by all modules: VeRA's base_model.vera_A
    for place, word in enumerate(words):
        if word.startswith(PEFT_WORDS):
            return ".".join(words[:place])
    return ".".join(words[:-1])


class BaseModules:
    """The modules of a base model, known from the names of its stored tensors.

    Args:
        stored: Names of all tensors of the base.
        types: The ``model_type`` of the base's config.json, followed by that of a nested language
            model, if any.
        forgiving: Whether an adapter's tensor may lack the prefix ``base_model.model.``, as it may
            if transformers itself loads the adapter.
    """

    def __init__(
        self, stored: Iterable[str], types: Collection[str] = (), *, forgiving: bool = False
    ) -> None:
        self._names: set[str] = set()
        for name in stored:
            words = words_of(name)
            # Fused and quantised modules are stored in parts: a module is also what others are in.
            for count in range(len(words) - 1, 0, -1):
                module = ".".join(words[:count])
                if module in self._names:
                    break
                self._names.add(module)
        self._types = types
        self._forgiving = forgiving

    def fits(self, name: str) -> bool:
        """Whether an adapter's tensor of this name changes a module that the base has.

        Also true for a tensor of the whole adapter, such as a prompt, and where the stored names
        cannot tell (see :meth:`has`). False for a name without PEFT's prefix, unless ``forgiving``.
        """
        module = module_of(name)
        if not module:
            return True
        if not self._forgiving and not name.startswith(PREFIX):
            return False
        return self.has(module)

    def has(self, module: str) -> bool:
        """Whether the base has a module of this name; True if the stored names cannot tell."""
        if module.startswith(tuple(_SURPLUS)):
            return False
        if self._renamed or module in _HEAD_MODULES:
            return True  # a tied head is not stored, and transformers 5 calls all of them lm_head
        if self._forgiving:
            return _without_wrappers(_to_layers(module)) in self._outside
        inner = module.removeprefix(self._class_prefix)
        if self._class_prefix and inner == module:
            return False
        if self._has_experts:
            # transformers 5 fuses them, and renames what stands around them.
            inner = _to_layers(inner)
        return inner in self._names

    def mistake(self, names: Iterable[str]) -> str:
        """Return why no module of the base fits the names of an adapter's tensors, and what to do.

        The text, for a message, is empty if no known mistake in saving explains the names.
        """
        modules = [module for module in map(module_of, names) if module]
        for surplus, how in _SURPLUS.items():
            if all(module.startswith(surplus) for module in modules):
                return (
                    f"{how}: remove the surplus {surplus!r} from the names of the adapter's tensors"
                )
        for prefix in sorted(_CLASS_PREFIXES):
            if all(self.has(prefix + module) for module in modules):
                return (
                    "the adapter was trained on a model loaded by AutoModel, which has no head: "
                    f"put {prefix!r} before the names of its modules"
                )
        return ""

    def example(self) -> str:
        """Return the name of one of the modules, to show in a message; empty if there is none."""
        inside = [name for name in self._names if _to_layers(name) != name]
        return min(inside or self._names, key=lambda name: (-name.count("."), name), default="")

    @cached_property
    def _renamed(self) -> bool:
        """Whether transformers 5 may rename any module: of a model inside a larger one, and of some types."""
        if not _RENAMED.isdisjoint(self._types):
            return True
        inner = _WRAPPER_WORDS - {"", "model", "transformer"}
        for name in self._names:
            words = name.split(".")[:2]
            if not inner.isdisjoint(words) or _TOWERS.search(".".join(words)):
                return True
        return False

    @cached_property
    def _has_experts(self) -> bool:
        """Whether some layers have experts."""
        return any("experts" in name.split(".") for name in self._names)

    @cached_property
    def _outside(self) -> frozenset[str]:
        """Names of the modules up to their layers, without wrappers, and of heads."""
        modules = map(_to_layers, self._names | _HEAD_MODULES)
        return frozenset(map(_without_wrappers, modules))

    @cached_property
    def _class_prefix(self) -> str:
        """What stands before modules in the base's class if the stored names lack it: ``transformer.``."""
        embedding = next((name for name in _EMBEDDING_MODULES if name in self._names), "")
        if not embedding or embedding.startswith(_CLASS_PREFIXES):
            return ""
        for prefix in _CLASS_PREFIXES:
            if prefix + embedding in _EMBEDDING_MODULES:
                return prefix
        return ""


def _to_layers(module: str) -> str:
    """A module's name up to the number of its layer."""
    words = itertools.takewhile(lambda word: not word.isdigit(), module.split("."))
    return ".".join(words)


def _without_wrappers(module: str) -> str:
    """A module's name without the wrappers before it."""
    word, _, inner = module.partition(".")
    if not inner or word not in _WRAPPER_WORDS:
        return module
    return _without_wrappers(inner)
