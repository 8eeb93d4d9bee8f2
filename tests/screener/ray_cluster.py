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


def main() -> None:
    import ray
    from lmeval_screener import cli
    from lmeval_screener.ranking.measured import Measured
    from lmeval_screener.registry.ray_engine import RayEngine
    from lmeval_screener.targets.training_runs import parse_targets
    from lmeval_screener.tokens.sets import load_token_set
    from ray.cluster_utils import Cluster

    folder = Path(sys.argv[1])
    names = [str(place) for place in sorted(folder.glob("model-*"))]
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

        def came(place: int, outcome: object, identity: str, state: str) -> None:
            if not told:
                cluster.remove_node(second, allow_graceful=False)
            assert isinstance(outcome, Measured), outcome
            told.append((place, outcome.gaps["cosine"].mean))

        sets = load_token_set("math", "domain"), load_token_set("reference", "reference")
        RayEngine(*sets, 60.0, block=2).read(parse_targets(names), came)
        found["told"] = sorted(told)
        found["left"] = left(ray)
        for number in range(2):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                store = ["--registry", str(folder / "s.duckdb"), "--format", "json"]
                status = cli.main([*names, str(folder / "none"), *store, "--engine", "ray"])
            found[f"run-{number}"] = [status, json.loads(out.getvalue()), err.getvalue()]
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
