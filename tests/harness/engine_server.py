"""Stands in for vLLM's server, and plants defects: its protocol, answered by a transformers model on the CPU.

Answers as `vllm serve MODEL --runner pooling --convert embed` does. A word at the start of the path plants a
defect: ``/unit``, ``/below`` (without the last block), ``/shifted``, ``/short``.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers

LONGEST = 512
FIELDS = {"model", "input", "encoding_format", "add_special_tokens", "use_activation"}


def embeddings(model: Any, body: dict[str, Any], defect: str) -> list[dict[str, Any]]:
    """The output projection's input after each prompt's last token, with the defect."""
    assert body.keys() <= FIELDS
    assert (body["model"], body["encoding_format"]) == ("tiny", "base64")
    data = []
    for index, tokens in enumerate(body["input"]):
        assert 0 < len(tokens) <= LONGEST
        with torch.no_grad():
            out = model.model(torch.tensor([tokens]), output_hidden_states=True)
            rows = model.model.norm(out.hidden_states[-2]) if defect == "below" else out.last_hidden_state
        vector = rows[0, -2 if defect == "shifted" and len(tokens) > 1 else -1]
        if body.get("use_activation") is not False or defect == "unit":
            vector = vector / vector.norm()
        content = base64.b64encode(vector.float().numpy().tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": content})
    data.reverse()  # only the index tells the order
    return data[1:] if defect == "short" else data


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: Any

    def do_GET(self) -> None:
        served = re.fullmatch(r"(/[a-z]+)?/v1/models", self.path)
        self.answer([{"id": "tiny", "max_model_len": LONGEST}] if served else None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        defect, _, path = self.path[1:].rpartition("v1/")
        self.answer(embeddings(self.model, body, defect.strip("/")) if path == "embeddings" else None)

    def answer(self, data: list[dict[str, Any]] | None) -> None:
        content = json.dumps({"error": {"message": "Not Found"}} if data is None else {"data": data}).encode()
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server of the model in ``folder``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    handler = type("Serving", (Handler,), {"model": model})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
