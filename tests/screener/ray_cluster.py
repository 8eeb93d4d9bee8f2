"""A Ray cluster of one node here, in a process of its own as Ray's warnings are not ours.

python ray_cluster.py    # prints its address; then the lines add, kill (the last node), end (all)
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

SETTINGS = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**SETTINGS, "include_dashboard": False})
    nodes = [cluster.head_node]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "add\n":
            nodes.append(cluster.add_node(**SETTINGS))
        for node in {"kill\n": nodes[-1:], "end\n": nodes}.get(line, []):
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        print("done", flush=True)


if __name__ == "__main__":
    main()
