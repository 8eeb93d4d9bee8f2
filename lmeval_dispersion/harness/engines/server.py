"""A server that answers JSON over HTTP, with failures as sentences, and what engines of that kind share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import HarnessError

_AT_ONCE = 64  # prompts a request
_PATIENCE = (10, 3600)  # seconds to connect, and for the states of one request


class Server:
    """One server of an engine.

    Args:
        base_url: Such as ``http://localhost:8000``; a trailing ``/v1`` is left out.
        start: The command that starts such a server, for messages.
    """

    def __init__(self, base_url: str, start: str) -> None:
        import requests
        from requests.adapters import HTTPAdapter, Retry

        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.start = start
        self._session = requests.Session()
        again = Retry(total=3, backoff_factor=0.5, status_forcelist=(502, 503, 504), allowed_methods=None)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=again))

    def get(self, path: str) -> Any:
        """The answer to GET, as JSON. Raises HarnessError as :meth:`post` does."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        """The answer to POST, as JSON.

        Raises:
            HarnessError: No server, a refusal (with its words), or an answer that is no JSON.
        """
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any) -> Any:
        import requests

        url = self.base_url + path
        try:
            answer = self._session.request(method, url, json=body, timeout=_PATIENCE)
        except requests.exceptions.RequestException as error:
            kind = "answers in time" if isinstance(error, requests.exceptions.Timeout) else "answers"
            raise HarnessError(
                f"no server {kind} at {url} ({type(error).__name__}); start one with `{self.start}` and pass "
                "its address as --base-url; what has been run is kept"
            ) from error
        if answer.status_code != 200:
            raise HarnessError(
                f"the server refused {url} (status {answer.status_code}): {_words(answer.text)}; "
                f"it must have been started with `{self.start}`"
            )
        try:
            return answer.json()
        except ValueError:
            raise HarnessError(
                f"expected JSON from {url}, got {_words(answer.text)}; check --base-url"
            ) from None


class EngineServer(ABC):
    """An engine behind such a server; see :class:`lmeval_dispersion.harness.engines.engine.Engine`.

    Args:
        base_url: Address of the server.
        model: What it was started with, for messages.
    """

    name: str
    layer: str

    def __init__(self, base_url: str, model: str) -> None:
        self.command = self.start(model)
        self._server = Server(base_url, self.command)

    @staticmethod
    @abstractmethod
    def start(model: str) -> str:
        """The command that starts such a server."""

    @abstractmethod
    def model(self) -> str | None:
        """What the server says it runs; None where it does not say."""

    def states(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """See :class:`lmeval_dispersion.harness.engines.engine.Engine`."""
        rows: list[NDArray[np.float32]] = []
        for start in range(0, len(prompts), _AT_ONCE):
            rows += self._asked([list(map(int, prompt)) for prompt in prompts[start : start + _AT_ONCE]])
        return np.stack(rows)

    @abstractmethod
    def _asked(self, prompts: list[list[int]]) -> list[NDArray[np.float32]]:
        """States of the prompts of one request, in their order.

        Raises:
            HarnessError: No server, a refusal, or another answer than states.
        """


def vector_or_empty(value: Any) -> NDArray[np.float32]:
    """Numbers of an answer as float32, empty where they are none."""
    try:
        return np.asarray(value, dtype=np.float32)
    except (ValueError, TypeError):
        return np.empty(0, dtype=np.float32)


def _words(text: str) -> str:
    line = " ".join(text.split())
    return line[:300] + (" …" if len(line) > 300 else "") if line else "nothing"
