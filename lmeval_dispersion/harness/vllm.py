"""Running logged prompts on a vLLM server, and the check that its states are those of transformers.

The pooling runner's ``POST /v1/embeddings`` takes lists of token ids, adds nothing to them, and answers
base64 of float32: the state after the final norm, the layer ``norm``. Tried with vLLM 0.32.0, see
``scripts/try_vllm.sh``.
"""

from __future__ import annotations

import base64
import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.harness.recording import (
    ContextRecorder,
    MakesRecorder,
    PrefillRecorder,
    Recorder,
    SegmentRecorder,
    TokenRecorder,
    Wanted,
    prefill,
)
from lmeval_dispersion.harness.records import Prompt

LAYER = "norm"

CHECKED = 8  # documents that both run
# How far two correct implementations may be apart: a state, as a share of its length, and the dispersion of
# the checked states. In 16 bits transformers itself moves by 2.5 to 3 % from one batch size to another
# (SmolLM2), and noise of that share raises a dispersion by up to its square.
TOLERANCE = {"float32": (0.01, 1e-3), "float64": (0.01, 1e-3)}
COARSE_TOLERANCE = (0.05, 0.05**2)  # bfloat16, float16

_AT_ONCE = 64  # prompts a request
_PATIENCE = (10, 3600)  # seconds to connect, and for the states of one request


class VllmServer:
    """A vLLM server with the pooling runner."""

    def __init__(self, base_url: str, model: str) -> None:
        import requests
        from requests.adapters import HTTPAdapter, Retry

        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.command = start_command(model)
        self._session = requests.Session()
        again = Retry(total=3, backoff_factor=0.5, status_forcelist=(502, 503, 504), allowed_methods=None)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=again))
        names = [entry.get("id") for entry in self._ask("GET", "/v1/models", None)]
        if not names or not isinstance(names[0], str):
            raise HarnessError(f"{self.base_url} serves no model; start it with `{self.command}`")
        self.model = names[0]  # its name on the server, which requests must carry

    def states(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """States (n, d) after the last token of each prompt, whose tokens are taken as they are."""
        rows: list[NDArray[np.float32]] = []
        for start in range(0, len(prompts), _AT_ONCE):
            asked = [list(map(int, prompt)) for prompt in prompts[start : start + _AT_ONCE]]
            body = {
                "model": self.model,
                "input": asked,
                "encoding_format": "base64",
                "add_special_tokens": False,
                "use_activation": False,  # no division by the length
            }
            entries = self._ask("POST", "/v1/embeddings", body)
            answered: dict[Any, Any] = {entry.get("index"): entry.get("embedding") for entry in entries}
            try:
                rows += [np.frombuffer(base64.b64decode(answered[i]), "<f4") for i in range(len(asked))]
            except (KeyError, TypeError, ValueError):
                raise HarnessError(
                    f"expected {len(asked)} states from {self.base_url}, got {len(answered)} answers; it "
                    f"must have been started with `{self.command}`"
                ) from None
        return np.stack(rows)

    def _ask(self, method: str, path: str, body: Any) -> list[dict[str, Any]]:
        """The entries under ``data`` of an answer."""
        import requests

        url = self.base_url + path
        try:
            answer = self._session.request(method, url, json=body, timeout=_PATIENCE)
        except requests.exceptions.RequestException as error:
            kind = "answers in time" if isinstance(error, requests.exceptions.Timeout) else "answers"
            raise HarnessError(
                f"no server {kind} at {url} ({type(error).__name__}); start one with `{self.command}` and "
                "pass its address as --base-url; what has been run is kept"
            ) from error
        said = " ".join(answer.text.split())[:300] or "nothing"
        if answer.status_code != 200:
            raise HarnessError(
                f"the server refused {url} (status {answer.status_code}): {said}; "
                f"it must have been started with `{self.command}`"
            )
        try:
            entries = answer.json()["data"]
            return [entry for entry in entries if isinstance(entry, dict)]
        except (ValueError, TypeError, KeyError):
            raise HarnessError(f"expected JSON from {url}, got {said}; check --base-url") from None


def start_command(model: str) -> str:
    """The command that starts a server that gives states."""
    pooler = '{"pooling_type": "LAST", "use_activation": false}'
    return f"vllm serve {shlex.quote(model)} --runner pooling --convert embed --pooler-config '{pooler}'"


class _OnServer(Recorder):
    """Mixin of recorders: lm-eval makes the tokens as ever and nothing is run; a server gives the states."""

    def __init__(self, server: VllmServer, lm: Any, _: Sequence[str], requests: Sequence[Any]) -> None:
        super().__init__(lm, [], requests)
        self.server = server
        self.inputs: list[tuple[Wanted, tuple[int, ...]]] = []  # a wanted state, and the tokens up to it

    @contextmanager
    def running(self) -> Iterator[None]:
        with super().running():
            yield
        # Equal segments and cut prompts run once; the longest first, so that what does not fit fails at once.
        unique = sorted({tokens for _, tokens in self.inputs}, key=lambda t: (-len(t), t))
        states = dict(zip(unique, self.server.states(unique), strict=True)) if unique else {}
        for wanted, tokens in self.inputs:
            wanted.vectors[LAYER] = states[tokens]


class _ScoredOnServer(_OnServer, TokenRecorder):
    shadows: tuple[str, ...] = ("_loglikelihood_tokens",)

    def expect(self, wanted: Wanted, tokens: list[int]) -> None:
        self.inputs.append((wanted, tuple(tokens[: wanted.position + 1])))

    def loglikelihood_tokens(self, original: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        def unanswered(requests: Any, *_: Any, **__: Any) -> list[tuple[float, bool]]:
            return [(math.nan, False)] * len(requests)

        return super().loglikelihood_tokens(unanswered, requests)


class _ContextsOnServer(_ScoredOnServer, ContextRecorder):
    pass


class _SegmentsOnServer(_ScoredOnServer, SegmentRecorder):
    shadows = ("_loglikelihood_tokens", "tok_encode")


class _PromptsOnServer(_OnServer, PrefillRecorder):
    def tok_batch_encode(self, original: Any, strings: Any, *args: Any, **kwargs: Any) -> Any:
        ids, mask = super().tok_batch_encode(original, strings, *args, **kwargs)
        for wanted, row, kept in zip(self.batch, ids, mask.bool(), strict=True):
            self.inputs.append((wanted, tuple(row[kept].tolist())))
        return ids, mask

    def model_generate(self, original: Any, *args: Any, **kwargs: Any) -> Tensor:
        context = kwargs["context"] if "context" in kwargs else args[0]
        return torch.cat([context, context[:, -1:]], dim=1)


def recorders(server: VllmServer) -> dict[str, MakesRecorder]:
    """The recorders that take states from a server; perplexities and answers are NaN, or of no meaning."""
    return {
        "loglikelihood": partial(_ContextsOnServer, server),
        "loglikelihood_rolling": partial(_SegmentsOnServer, server),
        "generate_until": partial(_PromptsOnServer, server),
    }


@dataclass(frozen=True)
class Agreement:
    """How far a server's states are from those of transformers, on the same prompts."""

    states: int  # how many were compared
    difference_max: float  # of two states of a prompt, as a share of the length of transformers'
    dispersion: float | None  # of the server's states; None for fewer than two
    hf_dispersion: float | None
    dtype: str  # of transformers' weights

    @property
    def holds(self) -> bool:
        """Whether both are within the tolerance."""
        share, apart = TOLERANCE.get(self.dtype, COARSE_TOLERANCE)
        difference = abs((self.dispersion or 0.0) - (self.hf_dispersion or 0.0))
        return self.difference_max <= share and difference <= apart

    def __str__(self) -> str:
        share, apart = TOLERANCE.get(self.dtype, COARSE_TOLERANCE)
        text = f"{self.states} states differ by up to {self.difference_max:.2%} of their length"
        if self.dispersion is not None:
            text += f", dispersion {self.dispersion:.4f} against {self.hf_dispersion:.4f}"
        return f"{text} (allowed in {self.dtype}: {share:.0%} and {apart:.4f})"


def agreement(states: ArrayLike, expected: ArrayLike, dtype: str) -> Agreement:
    """Compare states (n, d) of a server with those of transformers."""
    ours, theirs = (np.asarray(rows, dtype=np.float64) for rows in (states, expected))
    if ours.shape != theirs.shape:
        raise HarnessError(
            f"the server gives states of width {ours.shape[-1]}, and the model has {theirs.shape[-1]}: it "
            "runs another model; name that one, or start the server with this one"
        )
    several = len(ours) > 1
    return Agreement(
        states=len(ours),
        difference_max=float(np.max(np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1))),
        dispersion=dispersion(ours) if several else None,
        hf_dispersion=dispersion(theirs) if several else None,
        dtype=dtype,
    )


def check_server(server: VllmServer, lm: Any, prompts: Sequence[tuple[str, Prompt]]) -> Agreement | None:
    """Run some prompts of all lengths, with their types, on the server and on transformers.

    Returns:
        How far both agree, None where no prompt has a state. The prompts hold transformers' answers then.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i][1].args[0]), i))
    places = np.linspace(0, len(order) - 1, min(CHECKED, len(order))).round().astype(int)
    ours, theirs = [], []
    for i in [order[place] for place in places]:
        kind, prompt = prompts[i]
        by_server, by_hf = (replace(prompt, dispersion_layers=(LAYER,)) for _ in range(2))
        prefill(lm, kind, [by_hf])
        prefill(lm, kind, [by_server], recorders(server))
        prompt.answer = by_hf.answer
        if by_hf.dispersion_state.vectors:
            ours.append(by_server.dispersion_state.vectors[LAYER])
            theirs.append(by_hf.dispersion_state.vectors[LAYER])
    if not theirs:
        return None
    dtype = str(lm.model.dtype).removeprefix("torch.")
    return agreement(np.concatenate(ours), np.concatenate(theirs), dtype)
