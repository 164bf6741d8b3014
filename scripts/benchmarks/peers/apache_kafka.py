"""One Apache Kafka broker, its own controller, as a child, for comparisons with `streammeta kafka`.

scripts/kafka_peer fetches it. It runs with its defaults in a temporary directory on free ports. Its
internal topics have one replica.
"""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.benchmarks.peers.servers import PeerError
from streammeta.cli.local.local_cluster import Child, free_ports, start_child

ROOT = Path(__file__).resolve().parents[3]
CLASSPATH = ROOT / ".java" / "kafka-classpath"
READY_WITHIN_S = 120.0
STOPPED_WITHIN_S = 30.0
_POLL_S = 0.1
_CLUSTER_ID = "streammeta-peer-kafka1"


def missing() -> str:
    """Return how to install Apache Kafka, "" if it is installed."""
    if shutil.which("java") is None or shutil.which("javac") is None:
        return "java and javac are not on PATH; install a JDK, Java 17 or newer"
    if not CLASSPATH.exists():
        return "Apache Kafka is not fetched; run ./scripts/kafka_peer"
    missing_files = [file for file in class_path().split(":") if not Path(file).exists()]
    return f"{missing_files[0]} is missing; run ./scripts/kafka_peer" if missing_files else ""


def class_path() -> str:
    """Return the class path of Kafka's broker and clients."""
    return CLASSPATH.read_text().strip()


@contextmanager
def running_kafka(
    root: Path,
    heap: str = "512m",
    java: tuple[str, ...] = ("-XX:TieredStopAtLevel=1",),
    settings: str = "",
) -> Iterator[tuple[str, Child]]:
    """Run a broker in `root` until the block ends, and yield its address and its process.

    It goes on with the data that an earlier one has left there. `settings` are added to its own.

    Raises:
        PeerError: it did not start in time.
    """
    root.mkdir(parents=True, exist_ok=True)
    port, controller_port = free_ports(2)
    config = root / "server.properties"
    config.write_text(
        "process.roles=broker,controller\nnode.id=1\n"
        f"controller.quorum.voters=1@127.0.0.1:{controller_port}\n"
        f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}\n"
        f"advertised.listeners=PLAINTEXT://127.0.0.1:{port}\n"
        f"controller.listener.names=CONTROLLER\nlog.dirs={root / 'data'}\n"
        "offsets.topic.replication.factor=1\noffsets.topic.num.partitions=1\n"
        "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
        f"group.initial.rebalance.delay.ms=300\n{settings}"
    )
    machine = ("java", *java, f"-Xmx{heap}", "-cp", class_path())
    formatted = subprocess.run(
        [*machine, "kafka.tools.StorageTool", "format", "-g", "-t", _CLUSTER_ID, "-c", str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    if formatted.returncode != 0:
        raise PeerError(f"Kafka's directory could not be formatted:\n{formatted.stderr}")
    words = [*machine, "kafka.Kafka", str(config)]
    # Standard output goes to the log, since nobody reads the pipe.
    child = start_child("kafka", ["sh", "-c", 'exec "$@" >&2', "sh", *words], root / "kafka.log")

    try:
        _wait_until_it_listens(child, port)
        yield f"127.0.0.1:{port}", child
    finally:
        child.stop(STOPPED_WITHIN_S)


def _wait_until_it_listens(child: Child, port: int) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if not child.is_running:
            raise PeerError(f"Kafka ended; its log:\n{child.log_tail()}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(_POLL_S)
        else:
            return
    raise PeerError(f"Kafka did not listen within {READY_WITHIN_S:.0f} s")
