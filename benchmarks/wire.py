"""What one ranged read costs: `python benchmarks/wire.py [--requests 3000] [--rounds 5]`.

A server process answers ranged GETs of 7,168 bytes (a row of Qwen2.5-7B) on loopback. They are read by 128
workers side by side through `Transport.request` (aiohttp) and through `Transport.ranged` (our own
connections), and in batches of 106 through `Transport.batch`, two side by side; in turns, in one process,
with the same quotas, slots and meters. Printed is this process's CPU time a request, and aiohttp's over that
of a batch; then all over TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import re
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "screener")]
ROW, ROWS, WORKERS = 7168, 4096, 128
BATCH, BATCHES = 106, 2
WAYS = ("aiohttp", "ranged", "batch")


class Server(asyncio.Protocol):
    """Answers every range with that many bytes, and the fields that a content network sends."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head, self._received = self._received[:end], self._received[end + 4 :]
            match = re.search(rb"Range: bytes=(\d+)-(\d+)", head)
            assert match
            begin, last = int(match[1]), int(match[2])
            self._transport.write(
                b"HTTP/1.1 206 Partial Content\r\nContent-Type: binary/octet-stream\r\n"
                b"Content-Length: %d\r\nConnection: keep-alive\r\nDate: Sun, 22 Nov 2026 00:00:00 GMT\r\n"
                b"Last-Modified: Sun, 22 Nov 2026 00:00:00 GMT\r\nAccept-Ranges: bytes\r\n"
                b'ETag: "0123456789abcdef0123456789abcdef-12"\r\nServer: AmazonS3\r\n'
                b"Content-Range: bytes %d-%d/%d\r\nX-Cache: Hit from cloudfront\r\n"
                b"Via: 1.1 0123456789abcdef.cloudfront.net (CloudFront)\r\nAge: 1\r\n\r\n"
                % (last - begin + 1, begin, last, ROW * ROWS)
                + bytes(last - begin + 1)
            )


async def serve(folder: Path) -> None:
    """Listen on two ports until standard input ends."""
    loop, tls = asyncio.get_running_loop(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "certificate", folder / "key")
    for context in (None, tls):
        server = await loop.create_server(Server, "127.0.0.1", 0, backlog=1024, ssl=context)
        print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def cost(url: str, requests: int, way: str) -> float:
    """Microseconds of this process's CPU time a request, by ``aiohttp``, by ``ranged`` or by ``batch``."""
    from lmeval_screener.checkpoints.http import Budget, Transport, pieces, side_by_side
    from lmeval_screener.checkpoints.snapshot import Meter
    from lmeval_screener.checkpoints.wire import Reply
    from yarl import URL

    transport, meter, budget = Transport("http://127.0.0.1:1", None, "benchmark"), Meter(), Budget(600)
    address, left = URL(url), iter(range(requests))
    route, stored = transport.route(address), {"Accept-Encoding": "identity"}

    async def some() -> None:
        for number in left:
            begin = number % ROWS * ROW
            headers = {"Range": f"bytes={begin}-{begin + ROW - 1}"}
            answer = (
                transport.ranged(route, headers, meter, budget, ROW, 0)
                if way == "ranged"
                else transport.request("GET", address, {**headers, **stored}, meter, budget)
            )
            async with answer as response:
                body = bytearray()
                async for piece in pieces(response, meter):
                    body += piece
                assert response.status == 206
                assert len(body) == ROW

    def fits(reply: Reply, begin: int, end: int) -> bool:
        return reply.status == 206 and len(reply.body) == end - begin

    async def batches() -> None:
        while numbers := list(itertools.islice(left, BATCH)):
            spans = [(number % ROWS * ROW, (number % ROWS + 1) * ROW) for number in numbers]
            batch = transport.batch(route, {}, meter, spans, 0, fits)
            assert await batch.settled()
            batch.close()

    gc.collect()
    start = time.process_time()
    if way == "batch":
        async with transport.ranged(route, {"Range": "bytes=0-9"}, meter, budget, 10, 0):
            pass  # tells that there is no quota, as the header of a file does before its rows
        await side_by_side(batches() for _ in range(BATCHES))
    else:
        await side_by_side(some() for _ in range(WORKERS))
    spent = time.process_time() - start
    await transport.close()
    return 1e6 * spent / requests


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=3000, help="requests of a round (default: 3000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each (default: 5)")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(Path(args.serve)))
        return
    with tempfile.TemporaryDirectory() as folder:
        certificate = Path(folder) / "certificate"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
             "-keyout", f"{folder}/key", "-out", str(certificate)],
            check=True, capture_output=True,
        )  # fmt: skip
        os.environ["SSL_CERT_FILE"] = str(certificate)
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            plain, secret = (int(process.stdout.readline()) for _ in range(2))
            print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
            print(f"{'CPU µs a request':<18} {WAYS[0]:>18} {WAYS[1]:>18} {WAYS[2]:>18} {'ratio':>16}")
            for name, url in (
                ("plain", f"http://127.0.0.1:{plain}/f"),
                ("TLS", f"https://127.0.0.1:{secret}/f"),
            ):
                rounds = []
                for _ in range(args.rounds + 1):
                    rounds.append([asyncio.run(cost(url, args.requests, way)) for way in WAYS])
                del rounds[0]  # of imports and first connections
                columns = [*zip(*rounds, strict=True), [theirs / ours for theirs, _, ours in rounds]]
                cells = [
                    f"{statistics.median(one):.{digits}f} ({min(one):.{digits}f} to {max(one):.{digits}f})"
                    for one, digits in zip(columns, (0, 0, 0, 1), strict=True)
                ]
                print(f"{name:<18} {cells[0]:>18} {cells[1]:>18} {cells[2]:>18} {cells[3]:>16}")
        finally:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    main()
