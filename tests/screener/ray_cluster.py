"""A cluster of two nodes here, of which one dies: run by test_ray.py, as Ray's warnings are not ours.

python ray_cluster.py FOLDER    # screens FOLDER's checkpoints; prints JSON
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def left(ray: Any, patience: float = 90.0) -> int:
    """Nodes that live; the head hears of a death some heartbeats after it."""
    end = time.monotonic() + patience
    while (alive := sum(node["Alive"] for node in ray.nodes())) > 1 and time.monotonic() < end:
        time.sleep(0.2)
    return alive


def main(stack: contextlib.ExitStack) -> None:
    import ray
    from lmeval_screener import cli
    from lmeval_screener.ranking.measured import Measured
    from lmeval_screener.registry.ray_engine import RayEngine
    from lmeval_screener.targets.training_runs import parse_targets
    from lmeval_screener.tokens.sets import load_token_set
    from ray.cluster_utils import Cluster
    from storages import moto

    folder = Path(sys.argv[1])
    names = [str(place) for place in sorted(folder.glob("model-*"))]
    server = stack.enter_context(moto())
    for name in names[:3]:
        server.put(Path(name), f"zoo/{Path(name).name}")
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False},
    )
    os.environ["RAY_ADDRESS"] = cluster.address
    found: dict[str, object] = {}
    try:
        # Before the second node comes: this process must hang on the first, as the second will be lost.
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        second = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
        cluster.wait_for_nodes()
        found["nodes"] = sum(node["Alive"] for node in ray.nodes())
        told: list[tuple[int, object]] = []

        def came(place: int, read: object) -> None:
            if not told:
                cluster.remove_node(second, allow_graceful=False)
            outcome, *_ = read
            assert isinstance(outcome, Measured), outcome
            told.append((place, outcome.gaps["cosine"].mean))

        def run(name: str, places: list[str], *words: str) -> None:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = cli.main([*places, *words, "--format", "json", "--engine", "ray"])
            found[name] = [status, json.loads(out.getvalue()), err.getvalue()]

        # Buckets: which of them are as they were this process finds out by itself.
        for number in range(2):
            store = ["--registry", str(folder / "b.duckdb")]
            run(f"bucket-{number}", ["s3://box/zoo/*"], *store)
        # Controls while both nodes live; then the same registry again, which has them.
        kept = ["--registry", str(folder / "c.duckdb"), "--controls"]
        run("controls-0", names[:8], *kept)
        run("controls-1", names[:8], *kept)
        sets = load_token_set("math", "domain"), load_token_set("reference", "reference")
        with RayEngine(*sets, 60.0, block=2) as engine:
            engine.read(parse_targets(names), came)
        found["told"] = sorted(told)
        found["left"] = left(ray)
        for number in range(2):
            store = ["--registry", str(folder / "s.duckdb")]
            run(f"run-{number}", [*names, str(folder / "none")], *store)
        # Figures of this registry and of another one, controls of those that are not there yet.
        run("controls-2", names, *kept)
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        main(stack)
