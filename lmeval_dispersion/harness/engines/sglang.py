"""SGLang's server: the last token's input of the output projection, with the prompt's first new token.

Protocol: ``POST /generate`` with ``return_hidden_states="last"`` (since pull request 30177, August 2026), on
a server started with ``--return-hidden-states-mode last``; the state is in ``meta_info["hidden_states"]``. A
server that knows the older flag only answers with all tokens of the prompt, of which the last is taken.
"""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness.engines.server import EngineServer, vector_or_empty


class SglangServer(EngineServer):
    """See :class:`lmeval_dispersion.harness.engines.engine.Engine`."""

    name = "sglang"
    layer = "last"

    @staticmethod
    def start(model: str) -> str:
        """The command that starts such a server."""
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(model)} "
            "--return-hidden-states-mode last"
        )

    def model(self) -> str | None:
        """The path or id that the server was started with."""
        info = self._server.get("/get_model_info")
        name = info.get("model_path") if isinstance(info, dict) else None
        return name if isinstance(name, str) else None

    def _asked(self, prompts: list[list[int]]) -> list[NDArray[np.float32]]:
        answer = self._server.post(
            "/generate",
            {
                "input_ids": prompts,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_hidden_states": "last",
            },
        )
        if not isinstance(answer, list) or len(answer) != len(prompts):
            raise HarnessError(
                f"expected {len(prompts)} answers from {self._server.base_url}, got something else; "
                f"it must have been started with `{self.command}`"
            )
        return [self._vector(one, len(prompt)) for one, prompt in zip(answer, prompts, strict=True)]

    def _vector(self, answer: Any, tokens: int) -> NDArray[np.float32]:
        told = answer.get("meta_info") if isinstance(answer, dict) else None
        told = told if isinstance(told, dict) else {}
        if told.get("prompt_tokens", tokens) != tokens:
            raise HarnessError(
                f"SGLang ran {told['prompt_tokens']} tokens of a prompt of {tokens}: it cut or "
                "added some; start it with the model's whole context"
            )
        steps = told.get("hidden_states")
        if not steps:
            raise HarnessError(
                f"SGLang's answer holds no hidden states; start the server with `{self.command}`"
            )
        # The first step is the prompt's: one state, or one a token of it.
        vector = vector_or_empty(steps[0] if isinstance(steps, list) else None)
        if vector.ndim == 2 and len(vector):
            vector = vector[-1]
        if vector.ndim != 1 or vector.size == 0:
            raise HarnessError("expected the hidden states of a prompt from SGLang, got something else")
        return vector
