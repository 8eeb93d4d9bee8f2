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

REFUSED = {"AccessDenied", "RepoNotFound", "BadResponse"}
CONTRADICTED = {"BadResponse"}
FAILED = {"ServerError", "BadResponse"}
BROKEN = {"Unreachable", "BadResponse"}
SLOW = {"Timeout"}

#: Seconds for what ends by itself, which even a busy machine does in time, and for what goes on without end.
ENOUGH, SHORT = 30.0, 0.8

#: Each fault with the errors that it may end in; a body that is cut short can also be a listing of nothing.
FAULTS = [
    (faults.status(200), CONTRADICTED),
    *((faults.status(code), FAILED) for code in (206, 301, 416, 500, 503, 999)),
    *((faults.status(code), REFUSED) for code in (401, 403, 404)),
    *((faults.status(code, body=b""), FAILED) for code in (204, 304)),
    (faults.status(100, body=b""), SLOW | BROKEN),
    (faults.status(429), {"RateLimited"}),
    *((faults.status(429, {"Retry-After": value}), {"RateLimited"}) for value in ("0", "soon")),
    (faults.status(429, {"RateLimit": "t=-5"}), {"RateLimited"}),
    *((faults.status(302, {"Location": value}), BROKEN) for value in ("", "\x00", "http://\xb3")),
    *((faults.closed(reset=reset), BROKEN) for reset in (False, True)),
    (faults.truncated(0), BROKEN),
    # Each attempt gets a little further: that lasts as long as it may.
    *((faults.truncated(after), BROKEN | SLOW) for after in (1, 7)),
    (faults.truncated(5, reset=True), BROKEN | SLOW),
    (faults.drip(0.001), SLOW),
    (faults.stalled(0.05), set()),
    *((faults.header("Content-Encoding", value), CONTRADICTED) for value in ("gzip", "br", "nonsense")),
    (faults.header("Transfer-Encoding", "chunked"), BROKEN),
    (faults.header("ETag", "another"), set()),
    (faults.header("Content-Range", ""), CONTRADICTED),
    (faults.header("Link", '<http://[>; rel="next"'), CONTRADICTED),
    (faults.header("X-Repo-Commit", "main"), CONTRADICTED),
    (faults.header("X-Linked-Size", "-1"), CONTRADICTED),
    *((faults.content(body), CONTRADICTED) for body in (b"", b"[]", b'{"sha": null}', b"\x1f\x8b\x08no")),
    *(
        (lambda reply, request, by=by: replace(reply, length=max(reply.size + by, 0)), BROKEN)
        for by in (-1, 5, 10**30)
    ),
]


def outcome(tmp_path, seed):
    """``None`` if the rows came and are right, else the code of the error and what was allowed."""
    draw = random.Random(seed)
    folder = write_checkpoint(tmp_path / f"repo{seed}", head_and_embedding(), shards=draw.choice([1, 3]))
    file = FILE if (folder / FILE).exists() else "model-00003-of-00003.safetensors"
    truth = full_matrix(folder / file, HEAD)[list(IDS)]
    any_range, lifetime = draw.random() < 0.8, draw.choice([3600, 0.05])
    # Addresses that expire at once are refused again and again.
    allowed = {"AccessDenied"} if lifetime < 1 else set()
    with HubServer(any_range=any_range, lifetime=lifetime, page=2) as hub:
        hub.raw, hub.blobs_in_api = draw.random() < 0.8, draw.random() < 0.7
        hub.add("org/model", folder)
        for _ in range(draw.randint(1, 4)):
            part, times = draw.choice(["api", "raw", "resolve", "cdn"]), draw.choice([1, 1, 2, -1])
            fault, codes = draw.choice(FAULTS)
            hub.fault(part, fault, times=times)
            allowed |= codes
        try:
            seconds = SHORT if allowed >= SLOW else ENOUGH
            found = read(hub, tmp_path / f"cache{seed}", timeout=seconds)
        except ScreeningError as error:
            return error.code, allowed
        np.testing.assert_array_equal(found.rows, truth)
        return None


@pytest.mark.parametrize("seeds", [range(begin, begin + 10) for begin in (0, 10, 20)])
def test_any_mixture_ends_in_the_right_rows_or_an_error_that_its_faults_explain(tmp_path, seeds):
    outcomes = {seed: outcome(tmp_path, seed) for seed in seeds}
    unexplained = {seed: found for seed, found in outcomes.items() if found and found[0] not in found[1]}
    assert not unexplained
    assert sum(found is None for found in outcomes.values()) >= 2


#: Ways in which a server is wrong now and then.
RARE = [
    faults.status(200),
    faults.status(206),
    faults.status(206, {"Content-Type": "multipart/byteranges; boundary=x"}, b"--x--"),
    faults.shifted(2),
    faults.shorter(1),
    faults.shorter(-1),
    faults.header("Content-Range", "bytes 0-63/64"),
    faults.zipped,
    lambda reply, request: replace(reply, length=reply.size + 9),
]


def test_a_server_that_is_wrong_once_in_fifteen_times_loses_no_checkpoint(hub, tmp_path):
    folder = write_checkpoint(tmp_path / "repo", head_and_embedding(v=2000, d=64))
    hub.add("org/model", folder)
    ids = tuple(range(0, 2000, 40))
    truth = full_matrix(folder / FILE, HEAD)[list(ids)]
    draw, wrong = random.Random(0), []

    def rarely(reply, request):
        if draw.random() > 1 / 15:
            return reply
        wrong.append(draw.choice(RARE))
        return wrong[-1](reply, request)

    hub.fault("cdn", rarely)
    for number in range(24):
        np.testing.assert_array_equal(read(hub, tmp_path / f"cache{number}", ids=ids).rows, truth)
    assert {*wrong} == {*RARE}
