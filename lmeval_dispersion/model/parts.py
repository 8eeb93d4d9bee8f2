"""The parts of a decoder-only model, found by structure: its blocks, final norm and output projection."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


def unwrapped(model: nn.Module) -> nn.Module:
    """``model`` without PEFT, DDP, FSDP and ``torch.compile`` around it."""
    while True:
        if callable(getattr(model, "get_base_model", None)):
            inner = model.get_base_model()  # type: ignore[operator]
        else:
            inner = next((c for n in _WRAPPED if (c := _only_child(model, n)) is not None), None)
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def _only_child(model: nn.Module, name: str) -> nn.Module | None:
    children = dict(model.named_children())
    return children.get(name) if len(children) == 1 else None


def text_decoder(model: nn.Module) -> nn.Module:
    """The text decoder of a model that may have a vision tower beside it."""
    get_decoder = getattr(model, "get_decoder", None)
    inner = get_decoder() if callable(get_decoder) else None
    return inner if isinstance(inner, nn.Module) and block_lists(inner) else model


def depth(config: Any) -> int | None:
    """Number of blocks that the configuration of the text part tells, if it does."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    return layers if isinstance(layers, int) else None


def block_lists(root: nn.Module) -> list[tuple[nn.Module, nn.ModuleList]]:
    """Outermost lists whose members are built of modules, with the module that holds each."""
    found: list[tuple[nn.Module, nn.ModuleList]] = []
    for child in root.children():
        if isinstance(child, nn.ModuleList):
            if len(child) and all(any(True for _ in unwrapped(member).children()) for member in child):
                found.append((root, child))
        else:
            found += block_lists(child)
    return found


def final_norm(parent: nn.Module, blocks: nn.ModuleList) -> nn.Module | None:
    """The first norm registered after the blocks, else the last before them that is not the embedding's."""
    before: list[nn.Module] = []
    passed = False
    for name, child in parent.named_children():
        label = f"{name} {type(child).__name__}".lower()
        if child is blocks:
            passed = True
        elif "norm" in label or re.search(r"\bln", label):
            if passed:
                return child
            if "emb" not in label:
                before.append(child)
    return before[-1] if before else None


def head(model: nn.Module) -> nn.Module | None:
    """The output projection, or None for a bare decoder."""
    find = getattr(model, "get_output_embeddings", None)
    found = find() if callable(find) else None
    return found if isinstance(found, nn.Module) else None


def has_two_parts(block: nn.Module) -> bool:
    """Whether a block has a mixer and a feed-forward part: two sub-modules, no norms, one composite."""
    children = list(unwrapped(block).children())
    composite = [child for child in children if any(True for _ in child.children())]
    weights = [getattr(child, "weight", None) for child in children if child not in composite]
    linear = [w for w in weights if isinstance(w, Tensor) and w.ndim >= 2]
    return len(composite) >= 1 and len(composite) + len(linear) >= 2
