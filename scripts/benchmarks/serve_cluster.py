"""Runs the controllers of a tree until SIGTERM, for a benchmark of another tree or another Python.

    python -m scripts.benchmarks.serve_cluster DIRECTORY VOTERS [tls|audited]

Started with the tree's folders on the path (`baseline.command_in`), it leaves everything about the
controllers to that tree's `LocalCluster`. Prints `ready` and a JSON object once a leader serves:
its `endpoint`, its `leader_pid`, the `pids` of all, and for TLS `tls`, the paths of a caller's
authority, certificate and key. Every commit's words and answer have to stay the same.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path

from scripts.benchmarks.cluster import (
    PATIENT,
    audit_options,
    caller_of,
    find_leader,
    running_cluster,
    tls_paths,
)


def main() -> int:
    """Run the controllers until SIGTERM."""
    _, root, voters, *kind = sys.argv
    place, count = Path(root), int(voters)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    own_options = audit_options(place, count) if kind == ["audited"] else None

    with running_cluster(place, count, PATIENT, own_options, over_tls=kind == ["tls"]) as cluster:
        leader = asyncio.run(find_leader(cluster))
        answer = {
            "endpoint": leader.endpoint,
            "leader_pid": cluster.children[leader.node_id].pid,
            "pids": [child.pid for child in cluster.children.values()],
            "tls": tls_paths(caller_of(cluster)),
        }
        print(f"ready {json.dumps(answer)}", flush=True)
        while True:
            signal.pause()


if __name__ == "__main__":
    sys.exit(main())
