"""Two Ray nodes on this machine, run as a program so that nothing of them outlives it.

Prints their address, waits for its standard input to end, and ends them.
"""

import sys
from typing import Any

NUM_CPUS = 8  # of each node, by name: no core is taken by it
NODE: dict[str, Any] = {"num_cpus": NUM_CPUS, "object_store_memory": 80 << 20}


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
