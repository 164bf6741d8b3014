"""Runs the controllers of one tree until it is told to end: another tree's, or another Python's.

    python -m scripts.benchmarks.serve_cluster DIRECTORY VOTERS [tls|audited]

Started with the tree's folders on the path (`baseline.module_of`), it leaves everything about the
controllers to that tree's `LocalCluster`. Prints `ready` and a JSON object once a leader serves:
its `endpoint`, its `leader_pid` and the `pids` of all; over TLS, `tls` has the paths of a caller's
authority, certificate and key. Audited controllers have an audit log each.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path

from scripts.benchmarks.bench_cluster import caller_of, restart_changed, running_cluster
from scripts.benchmarks.commits import PATIENT, find_leader, recorded


def main() -> int:
    """Run the controllers until SIGTERM."""
    _, root, voters, *kind = sys.argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with running_cluster(Path(root), int(voters), PATIENT, over_tls=kind == ["tls"]) as cluster:
        if kind == ["audited"]:
            restart_changed(cluster, recorded(Path(root), lambda _, command: command))
        leader = asyncio.run(find_leader(cluster))
        caller = caller_of(cluster)
        files = () if caller is None else (caller.ca, caller.certificate, caller.key)
        told = {
            "endpoint": cluster.endpoints[leader.node_id - 1],
            "leader_pid": cluster.children[leader.node_id].pid,
            "pids": [child.pid for child in cluster.children.values()],
            "tls": [str(path) for path in files],
        }
        print(f"ready {json.dumps(told)}", flush=True)
        while True:
            signal.pause()


if __name__ == "__main__":
    sys.exit(main())
