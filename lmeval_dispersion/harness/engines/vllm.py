"""vLLM's server with the pooling runner: the state of the last token, after the final norm.

Protocol: ``POST /v1/embeddings`` takes lists of token ids, adds nothing to them, and answers base64 of
float32 (docs.vllm.ai, "Pooling Models", "OpenAI-Compatible Embeddings API"). The state is what the model
hands on after its final norm, before anything that some models do between norm and output projection: the
layer ``norm``.
"""

from __future__ import annotations

import base64
import shlex
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness.engines.server import EngineServer, vector_or_empty


class VllmServer(EngineServer):
    """See :class:`lmeval_dispersion.harness.engines.engine.Engine`."""

    name = "vllm"
    layer = "norm"

    def __init__(self, base_url: str, model: str) -> None:
        super().__init__(base_url, model)
        self._model: str | None = None

    @staticmethod
    def start(model: str) -> str:
        """The command that starts such a server."""
        pooler = '{"pooling_type": "LAST", "use_activation": false}'
        return f"vllm serve {shlex.quote(model)} --runner pooling --convert embed --pooler-config '{pooler}'"

    def model(self) -> str | None:
        """The model's name on the server: requests must carry it."""
        if self._model is None:
            listed = self._server.get("/v1/models")
            names = [entry.get("id") for entry in _list(listed, "data") if isinstance(entry, dict)]
            if not names or not isinstance(names[0], str):
                raise HarnessError(f"{self._server.base_url} serves no model; start it with `{self.command}`")
            self._model = names[0]
        return self._model

    def _asked(self, prompts: list[list[int]]) -> list[NDArray[np.float32]]:
        answer = self._server.post(
            "/v1/embeddings",
            {
                "model": self.model(),
                "input": prompts,
                "encoding_format": "base64",
                "add_special_tokens": False,
                "use_activation": False,  # no division by the length
            },
        )
        found = {entry.get("index"): entry.get("embedding") for entry in _list(answer, "data")}
        if set(found) != set(range(len(prompts))):
            raise HarnessError(
                f"expected {len(prompts)} states from {self._server.base_url}, got {len(found)}; "
                f"it must have been started with `{self.command}`"
            )
        return [_vector(found[i]) for i in range(len(prompts))]


def _list(answer: Any, key: str) -> list[Any]:
    found = answer.get(key) if isinstance(answer, dict) else None
    return found if isinstance(found, list) else []


def _vector(value: Any) -> NDArray[np.float32]:
    """One state, as base64 of float32 or, from servers that do not know the format, as numbers."""
    if isinstance(value, str):
        try:
            return np.frombuffer(base64.b64decode(value, validate=True), dtype="<f4").astype(np.float32)
        except ValueError:
            value = []
    vector = vector_or_empty(value)
    if vector.ndim != 1 or vector.size == 0:
        raise HarnessError(
            "expected one state a prompt from vLLM, got something else; set pooling_type to LAST"
        )
    return vector
