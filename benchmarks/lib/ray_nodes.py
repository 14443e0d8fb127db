"""A Ray cluster of processes on this machine, on the loopback interface: Ray's own, for tests."""

import os
from typing import Any


class Nodes:
    """A head without cores, where the command runs, and so many nodes of one core each."""

    def __init__(self, count: int, *, pinned: bool = False) -> None:
        """pinned: a node's processes run on its core alone, not only by Ray's count; while there are enough."""
        # Before Ray is imported: its word for one machine, loopback only.
        os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        from ray.cluster_utils import Cluster

        self._common: dict[str, Any] = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}
        head = {"num_cpus": 0, "include_dashboard": False, **self._common}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.count, self.nodes, self.pinned = count, list[Any](), pinned
        self.fill()

    @property
    def address(self) -> str:
        """Of the head."""
        return str(self.cluster.address)

    def fill(self) -> None:
        """All nodes again."""
        usable = os.sched_getaffinity(0)
        while len(self.nodes) < self.count:
            if self.pinned:
                os.sched_setaffinity(
                    0, {sorted(usable)[len(self.nodes) % len(usable)]}
                )  # children inherit it
            try:
                self.nodes.append(self.cluster.add_node(num_cpus=1, **self._common))
            finally:
                os.sched_setaffinity(0, usable)

    def remove(self, index: int) -> None:
        """One node goes at once, with its processes."""
        self.cluster.remove_node(self.nodes.pop(index), allow_graceful=False)

    def close(self) -> None:
        """All processes end."""
        self.cluster.shutdown()
