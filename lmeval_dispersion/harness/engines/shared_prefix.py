"""Running the tokens with which many prompts begin once: their keys and values serve all of them.

Few-shot examples are the greater part of most prompts and the same for all documents of a task. The first
batch is run both ways; where the answers differ by more than the noise of batching, or the model keeps no
plain cache of keys and values, everything runs as ever.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from lmeval_dispersion.harness.engines.inputs import model_inputs
from lmeval_dispersion.harness.recording import ContextRecorder, OneTokenRecorder

_SHORTEST = 32  # shared tokens: fewer are not worth a cache
_NOISE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 0.1  # of the logits' length, in 16 bits and fewer

log = logging.getLogger(__name__)


class SharedPrefix:
    """The shared beginning of some prompts.

    Args:
        model: The transformers model.
        prompts: Tokens of each prompt, and how many of them no batch needs the states of.

    Attributes:
        tokens: The shared tokens; empty where there are too few.
        saved: Tokens that need not have been run.
    """

    def __init__(self, model: Any, prompts: Sequence[tuple[Sequence[int], int]]) -> None:
        self.model = model
        self.saved = 0
        self.tokens = _common([tokens for tokens, _ in prompts])
        self.tokens = self.tokens[: min((free for _, free in prompts), default=0)]
        if len(prompts) < 2 or len(self.tokens) < _SHORTEST:
            self.tokens = []
        self._cache: Any = None

    def begins(self, rows: Tensor) -> bool:
        """Whether every row (b, t) begins with the shared tokens, is longer, and sharing works here."""
        count = len(self.tokens)
        if not count or rows.shape[1] <= count:
            return False
        shared = torch.tensor(self.tokens, device=rows.device)
        return bool((rows[:, :count] == shared).all()) and self._works(rows)

    def logits(self, rows: Tensor) -> Tensor:
        """Logits (b, t − shared, v) of what follows the shared tokens; padding is on the right."""
        cache = copy.deepcopy(self._cache)
        cache.batch_repeat_interleave(len(rows))
        self.saved += len(self.tokens) * (len(rows) - 1)
        logits: Tensor = self.model(rows[:, len(self.tokens) :], past_key_values=cache, use_cache=True).logits
        return logits

    def _works(self, rows: Tensor) -> bool:
        if self._cache is not None:
            return True
        from transformers import DynamicCache

        alone = rows[:1]
        shared = alone[:, : len(self.tokens)]
        try:
            cache = self.model(shared, use_cache=True).past_key_values
            if type(cache) is not DynamicCache or cache.get_seq_length() != len(self.tokens):
                raise ValueError("no plain cache of keys and values")
            self._cache = cache
            expected = self.model(alone).logits[0, len(self.tokens) :].float()
            found = self.logits(alone)[0].float()
            difference = float((found - expected).norm() / expected.norm())
            allowed = _NOISE.get(next(self.model.parameters()).dtype, _COARSE)
            if not difference <= allowed:
                raise ValueError(f"logits differ by {difference:.2g} of their length")
        except (ValueError, TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
            log.warning("shared beginnings of prompts are run for each of them: %s", error)
            self.tokens, self._cache = [], None
            return False
        self.saved = 0
        return True


def _common(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The longest common beginning; that of the first and the last in order is that of all."""
    if not prompts:
        return []
    low, high = min(map(list, prompts)), max(map(list, prompts))
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))]


class SharedContextRecorder(ContextRecorder):
    """Records log-likelihood requests and runs what their contexts share once.

    lm-eval takes logits that lack positions on the left as they come: it allows for virtual tokens there.
    """

    prefix: SharedPrefix | None = None

    def loglikelihood_tokens(self, original: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        """Also find out what the contexts share; prompts that are cut on the left share nothing."""
        whole = []
        for index, (_, context, continuation) in enumerate(requests, len(self.results)):
            wanted = self.plan(index, context, continuation)
            if wanted is not None and not wanted.truncated:
                start, stop = wanted.span
                free = min(wanted.position, start - 1) if stop > start else wanted.position
                whole.append((context[: wanted.position], max(free, 0)))
        self.prefix = SharedPrefix(self.lm.model, whole)
        return super().loglikelihood_tokens(original, requests, *args, **kwargs)

    def model_call(self, original: Any, inps: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As ever, or with the shared tokens' keys and values."""
        prefix = self.prefix
        if prefix is None or not prefix.tokens:
            return super().model_call(original, inps, *args, **kwargs)
        self.flush()  # the states of the last batch; the check of the first one is nobody's
        with torch.no_grad():
            if not prefix.begins(inps):
                return super().model_call(original, inps, *args, **kwargs)
            return super().model_call(lambda rows: prefix.logits(rows), inps)


class SharedPromptRecorder(OneTokenRecorder):
    """Records the prompts of generations and runs what they share once.

    Args:
        lm: lm-eval's model.
        layers: Names of the layers.
        requests: All requests that will be recorded.
    """

    def __init__(self, lm: Any, layers: Sequence[str], requests: Sequence[Any]) -> None:
        super().__init__(lm, layers)
        rows = [inputs.tokens[0] for inputs in model_inputs(lm, requests) if not inputs.wanted[0].truncated]
        self.prefix = SharedPrefix(lm.model, [(tokens, len(tokens) - 1) for tokens in rows])
        self.last: Tensor | None = None

    def model_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """As ever, or the one token that is most likely after the prompt."""
        context = kwargs["context"] if "context" in kwargs else args[0]
        mask = kwargs.get("attention_mask")
        if not self.prefix.tokens or mask is None:
            return super().model_generate(original, *args, **kwargs)
        lengths = mask.sum(dim=1)
        # lm-eval pads on the left; what follows a shared beginning is padded on the right.
        order = (torch.arange(context.shape[1], device=context.device) - lengths[:, None]) % context.shape[1]
        rows = context.gather(1, order)
        with torch.no_grad():
            if int(lengths.min()) <= len(self.prefix.tokens) or not self.prefix.begins(rows):
                return super().model_generate(original, *args, **kwargs)
            self.last = lengths - 1 - len(self.prefix.tokens)
            self.armed, self.fresh = True, {}
            try:
                logits = self.prefix.logits(rows)
            finally:
                self.armed = False
                self.flush()
                last, self.last = self.last, None
        best = logits[torch.arange(len(rows), device=logits.device), last.to(logits.device)].argmax(dim=-1)
        return torch.cat([context, best[:, None].to(context.device)], dim=1)

    def see(self, name: str, state: Tensor) -> None:
        """Take the position of each prompt's end."""
        if self.last is None:
            super().see(name, state)
        elif self.armed and name not in self.fresh:
            self.fresh[name] = state[
                torch.arange(len(state), device=state.device), self.last.to(state.device)
            ]
