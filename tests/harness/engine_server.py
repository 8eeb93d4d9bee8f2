"""Stands in for vLLM's server, and plants defects: its protocol, answered by a transformers model on the CPU.

Answers as `vllm serve MODEL --runner pooling --convert embed` does. A word at the start of the path plants a
defect: ``/unit``, ``/before-norm``, ``/below`` (without the last block), ``/shifted``, ``/short``.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers

MODEL: Any = None  # while it serves
LONGEST = 512
EXTRA = {"model", "input", "encoding_format", "add_special_tokens", "use_activation", "user", "dimensions"}


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def states(tokens: list[int], defect: str) -> torch.Tensor:
    """(t, d): what the output projection is given, with the defect."""
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens) or not tokens:
        raise Refusal(400, "input must be lists of token ids")
    if len(tokens) > LONGEST:
        raise Refusal(400, f"This model's maximum context length is {LONGEST} tokens")
    with torch.no_grad():
        out = MODEL.model(torch.tensor([tokens]), output_hidden_states=True)
    rows = out.last_hidden_state[0]
    if defect == "below":
        with torch.no_grad():
            rows = MODEL.model.norm(out.hidden_states[-2])[0]
    if defect == "before-norm":
        seen: list[torch.Tensor] = []
        handle = MODEL.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with torch.no_grad():
            MODEL.model(torch.tensor([tokens]))
        handle.remove()
        rows = seen[0][0]
    return rows[:-1] if defect == "shifted" and len(rows) > 1 else rows


def embeddings(body: dict[str, Any], defect: str) -> dict[str, Any]:
    if unknown := set(body) - EXTRA:
        raise Refusal(400, f"unknown fields {unknown}")
    if body["model"] != "tiny":
        raise Refusal(404, f"The model `{body['model']}` does not exist.")
    data = []
    for index, tokens in enumerate(body["input"]):
        vector = states(tokens, defect)[-1]
        if body.get("use_activation") is not False or defect == "unit":
            vector = vector / vector.norm()
        plain = body.get("encoding_format", "float") == "float"
        value = vector.tolist() if plain else base64.b64encode(vector.float().numpy().tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": value})
    data.reverse()  # the order is told by the index alone
    return {"object": "list", "model": "tiny", "data": data[1:] if defect == "short" else data}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: Any) -> None:
        path, defect = self.path.lstrip("/"), ""
        if not path.startswith("v1/"):
            defect, _, path = path.partition("/")
        status, found = 404, {"error": {"message": "Not Found"}}
        try:
            if path == "v1/models" and body is None:
                status, found = 200, {"data": [{"id": "tiny", "max_model_len": LONGEST}]}
            elif path == "v1/embeddings" and body is not None:
                status, found = 200, embeddings(body, defect)
        except Refusal as refusal:
            status, found = refusal.status, {"error": {"message": str(refusal), "code": refusal.status}}
        content = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server of the model in ``folder``."""
    global MODEL
    MODEL = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
