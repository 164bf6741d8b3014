"""Controllers for tests in Java: three on loopback, over a directory as their bucket.

Usage: cluster.py FOLDER plain|tls [OPTION...] [-- ADVERTISED...]

The options are options of `streammeta controller`, the advertised addresses belong to relays in
front of the controllers. Prints a JSON object once clients can connect. Answers each command on
standard input by a line: `kill ID`, `start ID`, `pause ID`, `resume ID`. Ends with its input.
"""

import json
import signal
import sys
import time
from pathlib import Path

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.local.dev_command import LocalCertificates
from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.cli.quorum.features_command import change_level
from streammeta.controller.features import SUPPORTED
from streammeta.tls.files import TlsFiles
from streammeta.tls.identity import Role

COUNT = 3
BROKERS = range(1, 5)


def main() -> None:
    """Run the controllers until standard input ends."""
    folder, security, *rest = sys.argv[1:]
    options, _, advertised = " ".join(rest).partition("-- ")
    root = Path(folder)
    bucket = root / "bucket"
    bucket.mkdir(parents=True, exist_ok=True)
    cluster = LocalCluster(root, "java", f"file://{bucket}", free_ports(COUNT), options.split())
    cluster.own_options = {
        node_id: ("--advertise", address)
        for node_id, address in enumerate(advertised.split(), start=1)
    }
    admin = None
    if security == "tls":
        certificates = LocalCertificates(root, "java")
        cluster.tls = certificates.controllers(cluster.node_ids)
        admin = certificates.of(Role.ADMIN, "dev")
        for node_id in BROKERS:
            certificates.of(Role.BROKER, node_id)
    try:
        cluster.start_all()
        raise_level(cluster, admin)
        print(json.dumps({"endpoints": cluster.endpoints}), flush=True)
        for line in sys.stdin:
            obey(cluster, *line.split())
            print("done", flush=True)
    finally:
        cluster.stop_all()


def raise_level(cluster: LocalCluster, admin: TlsFiles | None) -> None:
    """Raise the cluster to the newest feature level, once all controllers have connected."""
    until = time.monotonic() + 60
    with ControllerClient(cluster.endpoints, tls=admin) as client:
        while True:
            try:
                change_level(client, SUPPORTED.highest)
                return
            except CallError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)


def obey(cluster: LocalCluster, command: str, node_id: str) -> None:
    """Do something to one controller."""
    child = cluster.children[int(node_id)]
    match command:
        case "kill":
            child.kill()
        case "start":
            cluster.start(int(node_id))
        case "pause":
            child.process.send_signal(signal.SIGSTOP)
        case "resume":
            child.process.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    main()
