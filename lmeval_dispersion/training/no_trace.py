"""A model in training is asked and measured, and left exactly as it was.

lm-eval seeds all generators, puts the model into evaluation mode, ties its weights and gives the
tokenizer a padding token; a generation may change the model's configuration. Restored at the end of
the block, also after an error:

===========================  =====================================================================
random numbers               Python's, NumPy's, torch's on the CPU and on every device in use
modes                        training or evaluation of every module by itself
configuration                attributes of the model's configurations, such as ``use_cache``
shards                       FSDP2 gathers whole weights for a pass and would keep some until a
                             backward pass: they are sharded again
progress bars                those of transformers and datasets, which loading a task turns off
===========================  =====================================================================

Gradients are not touched: nothing in the block is recorded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import datasets
import numpy as np
import torch
from torch import nn
from transformers.utils import logging as transformers_logging

_DEVICES = ("cuda", "xpu", "npu")  # torch's modules that keep a generator for each device


@contextmanager
def without_trace(model: nn.Module | None = None) -> Iterator[None]:
    """Put a model into evaluation mode inside the block, without gradients; then restore it.

    Random generators, progress bars, and the model's modes, configurations and shards (of FSDP) are
    restored, also after an error.

    Args:
        model: The model. None to restore random generators and progress bars alone; gradients are
            off inside the block then, too.
    """
    with ExitStack() as stack:
        stack.enter_context(_generators())
        stack.enter_context(_progress_bars())
        if model is not None:
            stack.enter_context(_configurations(model))
            stack.enter_context(_modes(model))
            stack.enter_context(_shards(model))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def _generators() -> Iterator[None]:
    python = random.getstate()
    numpy = np.random.get_state()
    cpu = torch.get_rng_state()
    devices = {}
    for name in _DEVICES:
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and module.is_initialized():
            devices[name] = module.get_rng_state_all()
    metal = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for name, states in devices.items():
            getattr(torch, name).set_rng_state_all(states)
        if metal is not None:
            torch.mps.set_rng_state(metal)


@contextmanager
def _progress_bars() -> Iterator[None]:
    of_transformers = transformers_logging.is_progress_bar_enabled()
    of_datasets = datasets.are_progress_bars_disabled()
    try:
        yield
    finally:
        if of_transformers:
            transformers_logging.enable_progress_bar()
        if not of_datasets:
            datasets.enable_progress_bars()


@contextmanager
def _modes(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        model.eval()
        for module in training:
            module.training = True


@contextmanager
def _configurations(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of every configuration in the model, each object once."""
    kept: dict[int, tuple[Any, dict[str, Any]]] = {}
    for module in model.modules():
        for name in ("config", "generation_config"):
            config = module.__dict__.get(name)
            if hasattr(config, "__dict__"):
                kept[id(config)] = (config, dict(vars(config)))
    try:
        yield
    finally:
        for config, attributes in kept.values():
            vars(config).clear()
            vars(config).update(attributes)


@contextmanager
def _shards(model: nn.Module) -> Iterator[None]:
    try:
        yield
    finally:
        for module in model.modules():
            reshard = getattr(module, "reshard", None)
            if callable(reshard):
                reshard()
