"""Running logged prompts on a vLLM server, and the check that its states are those of transformers.

Protocol: the pooling runner's ``POST /v1/embeddings`` takes lists of token ids, adds nothing to them, and
answers base64 of float32 (docs.vllm.ai, "Pooling Models", "OpenAI-Compatible Embeddings API"). The state is
the one after the final norm, before anything that some models do between norm and output projection: the
layer ``norm``. Tried with vLLM 0.32.0, see ``scripts/try_vllm.sh``.
"""

from __future__ import annotations

import base64
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.harness import requests
from lmeval_dispersion.harness.prefill import Prefill, Seen, on_transformers
from lmeval_dispersion.harness.recording import (
    ContextRecorder,
    PrefillRecorder,
    SegmentRecorder,
    TokenRecorder,
    Wanted,
)

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
        self._model: str | None = None

    def model(self) -> str:
        """The model's name on the server, which requests must carry."""
        if self._model is None:
            listed = self._ask("GET", "/v1/models", None)
            names = [entry.get("id") for entry in _entries(listed) if isinstance(entry, dict)]
            if not names or not isinstance(names[0], str):
                raise HarnessError(f"{self.base_url} serves no model; start it with `{self.command}`")
            self._model = names[0]
        return self._model

    def states(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """States (n, d) after the last token of each prompt, whose tokens are taken as they are."""
        rows: list[NDArray[np.float32]] = []
        for start in range(0, len(prompts), _AT_ONCE):
            asked = [list(map(int, prompt)) for prompt in prompts[start : start + _AT_ONCE]]
            body = {
                "model": self.model(),
                "input": asked,
                "encoding_format": "base64",
                "add_special_tokens": False,
                "use_activation": False,  # no division by the length
            }
            entries = _entries(self._ask("POST", "/v1/embeddings", body))
            answered = {entry.get("index"): entry.get("embedding") for entry in entries}
            if set(answered) != set(range(len(asked))):
                raise HarnessError(
                    f"expected {len(asked)} states from {self.base_url}, got {len(answered)}; "
                    f"it must have been started with `{self.command}`"
                )
            rows += [_vector(answered[i]) for i in range(len(asked))]
        return np.stack(rows)

    def _ask(self, method: str, path: str, body: Any) -> Any:
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
        if answer.status_code != 200:
            raise HarnessError(
                f"the server refused {url} (status {answer.status_code}): {_words(answer.text)}; "
                f"it must have been started with `{self.command}`"
            )
        try:
            return answer.json()
        except ValueError:
            raise HarnessError(
                f"expected JSON from {url}, got {_words(answer.text)}; check --base-url"
            ) from None


def start_command(model: str) -> str:
    """The command that starts a server that gives states."""
    pooler = '{"pooling_type": "LAST", "use_activation": false}'
    return f"vllm serve {shlex.quote(model)} --runner pooling --convert embed --pooler-config '{pooler}'"


def on_server(server: VllmServer, lm: Any) -> Prefill:
    """Runs the tokens that lm-eval's model would be given on a server; perplexities and answers are NaN."""

    def prefill(instances: Sequence[Instance]) -> list[Seen]:
        inputs = _model_inputs(lm, instances)
        # Equal segments and cut prompts run once; the longest first, so that what does not fit fails at once.
        unique = sorted({tokens for pairs in inputs for _, tokens in pairs}, key=lambda t: (-len(t), t))
        states = server.states(unique) if unique else np.empty((0, 0), dtype=np.float32)
        of_tokens = dict(zip(unique, states, strict=True))
        seen = []
        for instance, pairs in zip(instances, inputs, strict=True):
            for wanted, tokens in pairs:
                wanted.vectors[LAYER] = of_tokens[tokens]
            state = requests.state_for(instance, [wanted for wanted, _ in pairs])
            state.perplexity = [math.nan] * len(pairs)
            seen.append(Seen(state, math.nan))
        return seen

    return prefill


@dataclass(frozen=True)
class Agreement:
    """How far a server's states are from those of transformers, on the same prompts.

    Attributes:
        states: How many were compared.
        difference_max: Largest distance of two states of a prompt, as a share of the length of transformers'.
        dispersion: Of the server's states; None for fewer than two.
        hf_dispersion: Of those of transformers.
        dtype: Of transformers' weights.
        unit: Whether the server's states all have length 1 and transformers' do not.
    """

    states: int
    difference_max: float
    dispersion: float | None
    hf_dispersion: float | None
    dtype: str
    unit: bool

    @property
    def holds(self) -> bool:
        """Whether both are within :data:`TOLERANCE`."""
        share, apart = TOLERANCE.get(self.dtype, COARSE_TOLERANCE)
        if self.dispersion is None or self.hf_dispersion is None:
            return self.difference_max <= share
        return self.difference_max <= share and abs(self.dispersion - self.hf_dispersion) <= apart

    @property
    def figures(self) -> dict[str, Any]:
        """The same for a manifest."""
        return {name: value for name, value in asdict(self).items() if name != "unit"}

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
            "runs another model; name that one as --model, or start the server with this one"
        )
    lengths = np.linalg.norm(theirs, axis=1)
    several = len(ours) > 1
    return Agreement(
        states=len(ours),
        difference_max=float(np.max(np.linalg.norm(ours - theirs, axis=1) / lengths)),
        dispersion=dispersion(ours) if several else None,
        hf_dispersion=dispersion(theirs) if several else None,
        dtype=dtype,
        unit=bool(
            np.allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-2) and not np.allclose(lengths, 1, atol=0.1)
        ),
    )


def check_server(
    server: VllmServer, lm: Any, instances: Sequence[Instance]
) -> tuple[Agreement | None, dict[int, Seen]]:
    """Run some requests on the server and on transformers."""
    order = sorted(range(len(instances)), key=lambda i: (len(instances[i].args[0]), i))
    places = np.linspace(0, len(order) - 1, min(CHECKED, len(order))).round().astype(int)
    chosen = [order[place] for place in places]
    expected = {i: on_transformers(lm)([instances[i]])[0] for i in chosen}
    by_server: dict[int, Seen] = {}
    for kind in sorted({instances[i].request_type for i in chosen}):
        same = [i for i in chosen if instances[i].request_type == kind]
        by_server.update(zip(same, on_server(server, lm)([instances[i] for i in same]), strict=True))
    having = [i for i in chosen if expected[i].state.vectors]
    if not having:
        return None, expected
    ours, theirs = (
        np.concatenate([run[i].state.vectors[LAYER] for i in having]) for run in (by_server, expected)
    )
    return agreement(ours, theirs, str(lm.model.dtype).removeprefix("torch.")), expected


def refusal(server: VllmServer, agreement: Agreement) -> HarnessError:
    """The error of a server whose states are not those of transformers."""
    why = (
        "the server divides states by their length"
        if agreement.unit
        else "it runs another model, precision, layer or tokenizer"
    )
    return HarnessError(
        f"vllm does not give the states of transformers: {agreement}: {why}; start it with "
        f"`{server.command}`, or use --backend hf"
    )


_Pair = tuple[Wanted, tuple[int, ...]]  # a wanted state, and the tokens up to it


def _model_inputs(lm: Any, instances: Sequence[Instance]) -> list[list[_Pair]]:
    """Each request's wanted states with the tokens up to them, by lm-eval's own code; nothing is run."""
    kind = instances[0].request_type
    if kind == requests.REQUEST_TYPES["generate_until"]:
        prompts = _PromptInputs(lm, [])
        with prompts.running():
            lm.generate_until(instances, disable_tqdm=True)
        return [[(prompts.results[i.args[0]], prompts.tokens[i.args[0]])] for i in instances]
    if kind == requests.REQUEST_TYPES["loglikelihood_rolling"]:
        segments = _SegmentInputs(lm, [])
        with segments.running():
            lm.loglikelihood_rolling(instances, disable_tqdm=True)
        bounds = requests.segment_bounds(lm, segments.texts)
        return [segments.pairs[start:stop] for start, stop in bounds]
    contexts = _ContextInputs(lm, [], [(i.args[0], getattr(i, "query", None)) for i in instances])
    with contexts.running():
        lm.loglikelihood(instances, disable_tqdm=True)
    return [[pair] for pair in contexts.pairs]


class _NotRun(TokenRecorder):
    """Mixin of recorders: the tokens up to each wanted position are kept, and nothing is computed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pairs: list[_Pair] = []

    def loglikelihood_tokens(self, original: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        for _, context, continuation in requests:
            wanted = self.plan(len(self.pairs), context, continuation)
            assert wanted is not None  # every logged document has one request
            tokens = (context + continuation)[-(self.lm.max_length + 1) :][:-1]
            self.pairs.append((wanted, tuple(tokens[: wanted.position + 1])))
        return [(math.nan, False)] * len(requests)


class _ContextInputs(_NotRun, ContextRecorder):
    shadows = ("_loglikelihood_tokens",)


class _SegmentInputs(_NotRun, SegmentRecorder):
    shadows = ("_loglikelihood_tokens", "tok_encode")


class _PromptInputs(PrefillRecorder):
    def __init__(self, lm: Any, layers: Sequence[str]) -> None:
        super().__init__(lm, layers)
        self.tokens: dict[str, tuple[int, ...]] = {}

    def tok_batch_encode(self, original: Any, strings: Any, *args: Any, **kwargs: Any) -> Any:
        ids, mask = super().tok_batch_encode(original, strings, *args, **kwargs)
        for prompt, row, kept in zip(self.prompts, ids, mask.bool(), strict=True):
            self.tokens[prompt] = tuple(row[kept].tolist())
        self.results.update(zip(self.prompts, self.wanted, strict=True))
        return ids, mask

    def model_generate(self, original: Any, *args: Any, **kwargs: Any) -> Tensor:
        context = kwargs["context"] if "context" in kwargs else args[0]
        return torch.cat([context, context[:, -1:]], dim=1)


def _entries(answer: Any) -> list[Any]:
    entries = answer.get("data") if isinstance(answer, dict) else None
    return entries if isinstance(entries, list) else []


def _vector(value: Any) -> NDArray[np.float32]:
    try:
        content = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
        vector = np.frombuffer(content, dtype="<f4").astype(np.float32)
    except ValueError:
        vector = np.empty(0, dtype=np.float32)
    if vector.size == 0:
        raise HarnessError(
            "expected one state a prompt from vLLM, got something else; set pooling_type to LAST"
        )
    return vector


def _words(text: str) -> str:
    line = " ".join(text.split())
    return line[:300] + (" …" if len(line) > 300 else "") if line else "nothing"
