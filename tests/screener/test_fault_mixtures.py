"""Several faults at once, drawn at random: the right rows or a named error, never anything else."""

from __future__ import annotations

import random
from dataclasses import replace

import hub_faults as faults
import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from hub_client import FILE, HEAD, IDS, full_matrix, read
from hub_server import HubServer
from lmeval_screener.errors import ScreeningError

FAULTS = [
    *(faults.status(code) for code in (200, 206, 301, 401, 403, 404, 416, 429, 500, 503, 999)),
    *(faults.status(code, body=b"") for code in (100, 204, 304)),
    *(faults.status(429, {"Retry-After": value}) for value in ("0", "soon", "Wed, 21 Oct 2015 07:28:00 GMT")),
    faults.status(429, {"RateLimit": "t=-5"}),
    *(faults.status(302, {"Location": value}) for value in ("", "\x00", "https://[::1", "http://\xb3")),
    *(faults.closed(reset=reset) for reset in (False, True)),
    *(faults.truncated(after) for after in (0, 1, 7)),
    faults.truncated(5, reset=True),
    faults.drip(0.001),
    faults.stalled(0.05),
    *(faults.header("Content-Encoding", value) for value in ("gzip", "br", "nonsense")),
    faults.header("Transfer-Encoding", "chunked"),
    faults.header("ETag", "another"),
    faults.header("Content-Range", ""),
    faults.header("Link", '<http://[>; rel="next"'),
    faults.header("X-Repo-Commit", "main"),
    faults.header("X-Linked-Size", "-1"),
    *(faults.content(body) for body in (b"", b"{}", b"[]", b"null", b'{"sha": null}', b"\x1f\x8b\x08no")),
    *(lambda reply, request, by=by: replace(reply, length=max(reply.size + by, 0)) for by in (-1, 5, 10**30)),
]


@pytest.mark.parametrize("seed", range(30))
def test_any_mixture_ends_in_the_right_rows_or_a_named_error(tmp_path, seed):
    draw = random.Random(seed)
    folder = write_checkpoint(tmp_path / "repo", head_and_embedding(), shards=draw.choice([1, 3]))
    file = FILE if (folder / FILE).exists() else "model-00003-of-00003.safetensors"
    truth = full_matrix(folder / file, HEAD)[list(IDS)]
    with HubServer(any_range=draw.random() < 0.8, lifetime=draw.choice([3600, 0.05]), page=2) as hub:
        hub.raw, hub.blobs_in_api = draw.random() < 0.8, draw.random() < 0.7
        hub.add("org/model", folder)
        for _ in range(draw.randint(1, 4)):
            part, times = draw.choice(["api", "raw", "resolve", "cdn"]), draw.choice([1, 2, -1])
            hub.fault(part, draw.choice(FAULTS), times=times)
        try:
            found = read(hub, tmp_path / "cache", timeout=0.8)
        except ScreeningError:
            return
        np.testing.assert_array_equal(found.rows, truth)
