"""Stock broker of RocketMQ with its tiered store, and RocketMQ's clients."""

import shutil
from collections.abc import Sequence

from scripts.demonstration import steps
from scripts.demonstration.stock_broker import LOCALHOST, TIMEOUT_S, TOPIC, StockBroker
from streammeta.cli.local.local_cluster import Child, free_ports

_BYTES_IN_CONSUME_QUEUE = 20
"""Size of a message's entry in a consume queue."""


class StockRocketmq(StockBroker):
    """A name server and a broker, and a topic with several queues."""

    name = "RocketMQ"
    artifact = "rocketmq-broker"
    node_id = 2
    row_count = 10_000
    java_options = (
        *("-Xmx400m", "-XX:MaxDirectMemorySize=512m"),
        "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
        "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
        "--add-opens=java.base/java.nio=ALL-UNNAMED",
    )

    def start(self) -> None:
        """Start the name server and the broker."""
        self._name_port, ha_port = free_ports(2)
        names = self._write_settings("namesrv.conf", {"listenPort": self._name_port})
        child = self._java("namesrv", "org.apache.rocketmq.namesrv.NamesrvStartup", "-c", names)
        self._wait_for_port(self._name_port, child)
        plug_in = {
            "controllers": ",".join(self._caller.endpoints),
            "bucket": self._endpoint.store_uri,
            "node.id": self.node_id,
            **self._tls(),
        }
        settings = {
            "namesrvAddr": f"{LOCALHOST}:{self._name_port}",
            "listenPort": self._port,
            "haListenPort": ha_port,
            "brokerIP1": LOCALHOST,
            "brokerIP2": LOCALHOST,
            "storePathRootDir": self._folder / "store",
            "mappedFileSizeCommitLog": 64 << 20,
            "timerWheelEnable": "false",
            "tieredStoreFilePath": self._write_settings("streammeta.properties", plug_in),
            # Uploads go on while rows are written.
            "tieredStoreGroupCommitCount": 500,
            "tieredStoreGroupCommitTimeout": 1_000,
        }
        self._config = self._write_settings("broker.conf", settings, self._example("broker.conf"))
        self._broker = self._start_broker()

    def _start_broker(self) -> Child:
        # The plug-in comes last: everything that it brings along has to be its own.
        main = "org.apache.rocketmq.broker.BrokerStartup"
        child = self._java("broker", main, "-c", self._config, more=self._jars())
        self._wait_for_port(self._port, child)
        return child

    def write(self, rows: Sequence[bytes]) -> None:
        """Send a message for each row."""
        (self._folder / "send").write_bytes(b"".join(row + b"\n" for row in rows))
        self._run_client("send")

    def _run_client(self, call: str, *words: object) -> None:
        """Let the client send the lines of a file, or receive lines into it."""
        place = (f"{LOCALHOST}:{self._name_port}", TOPIC, self._folder / call)
        main, classes = (
            "io.streammeta.rocketmq.StockClient",
            self._plug_in() / "target/test-classes",
        )
        self._wait_for_end(self._java(call, main, call, *place, *words, more=[classes]))

    def lose_local_files(self) -> int:
        """Wait until the bucket has all messages, kill the broker, and delete its files."""
        steps.wait_until(
            lambda: self._messages_in_bucket() >= len(self.rows), "RocketMQ uploads", TIMEOUT_S
        )
        self._broker.kill()
        for folder in ("commitlog", "consumequeue", "index", "tiered_index_file"):
            shutil.rmtree(self._folder / "store" / folder, ignore_errors=True)
        self._broker = self._start_broker()
        return len(self.rows)

    def _messages_in_bucket(self) -> int:
        sizes = (
            size
            for name, size in self.objects().items()
            if f"/{TOPIC}/" in name and "/CONSUME_QUEUE/" in name
        )
        return sum(sizes) // _BYTES_IN_CONSUME_QUEUE

    def read_back(self) -> int:
        """Receive all queues from their beginning."""
        self._run_client("receive", len(self.rows))
        received = set((self._folder / "receive").read_bytes().splitlines())
        if unknown := received - set(self.rows):
            raise RuntimeError(f"RocketMQ has messages that nobody sent: {min(unknown)!r}")
        return len(received)
