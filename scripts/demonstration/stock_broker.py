"""Stock broker of `demo --brokers`: what Kafka's and RocketMQ's have in common.

Owns its processes, and the files of settings. Broker and clients are released artifacts. Nothing
but the plug-in is ours.
"""

import os
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from scripts.demonstration import steps
from scripts.demonstration.stage import Stage
from streammeta.cli.local.local_cluster import Child, free_ports, start_child, taken_ports

ROOT = Path(__file__).parent.parent.parent
TOPIC = "flights"
LOCALHOST = "127.0.0.1"
TIMEOUT_S = 240.0

_TO_THE_LOG = ("sh", "-c", 'exec "$@" >&2', "sh")
"""Starts the next words with their output in the log, as nobody reads what a broker prints."""

# On few processors the thorough compiler and the parallel collector cost more than they save.
_SHORT_LIVED = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


class StockBroker(ABC):
    """A broker with its plug-in, and a topic for `rows` that loses its local files."""

    name: ClassVar[str]
    artifact: ClassVar[str]
    """Artifact of the broker, whose version is shown."""
    node_id: ClassVar[int]
    row_count: ClassVar[int]
    java_options: ClassVar[Sequence[str]]

    def __init__(self, stage: Stage, java_home: Path, rows: Sequence[bytes]) -> None:
        self.rows = rows
        self._java_home = java_home
        self._endpoint = stage.endpoint
        self._admin = stage.callers.admin
        self._caller = stage.callers.broker(self.node_id)
        self._folder = stage.root / self.name.lower()
        self._folder.mkdir()
        # RocketMQ also listens two ports below.
        self._port = next(port for port in free_ports(8) if not taken_ports([port - 2]))
        self._children: list[Child] = []

    def __str__(self) -> str:
        """Return its name and version."""
        return f"{self.name} {self.version}"

    @property
    def version(self) -> str:
        """Version of the released broker."""
        found = re.search(rf"/{self.artifact}-([\d.]+)\.jar", ":".join(self._released()))
        assert found is not None
        return found[1]

    @classmethod
    def find_missing(cls) -> str:
        """Return what set-up could not provide, or an empty text."""
        if not cls._jars():
            return f"{cls._plug_in().name} is not built"
        if not all(map(os.path.exists, cls._released())):
            return "its artifacts are not fetched"
        return ""

    @abstractmethod
    def start(self) -> None:
        """Start the broker, and wait until its topic can be written."""

    @abstractmethod
    def write(self, rows: Sequence[bytes]) -> None:
        """Write rows, and wait until all are acknowledged."""

    @abstractmethod
    def lose_local_files(self) -> int:
        """Wait for the uploads, lose the local files, and return the rows only in the bucket."""

    @abstractmethod
    def read_back(self) -> int:
        """Read the topic from its beginning, and return the number of rows that were there.

        Raises:
            RuntimeError: the topic has something else.
        """

    def objects(self) -> Mapping[str, int]:
        """Return the sizes of its objects in the bucket, by name."""
        return steps.named_objects(self._admin, f"{self.name.lower()}-tiered/")

    def stop(self) -> None:
        """End its processes."""
        for child in reversed(self._children):
            child.kill()

    @classmethod
    def _plug_in(cls) -> Path:
        return ROOT / "clients" / "java" / f"streammeta-{cls.name.lower()}-tiered"

    @classmethod
    def _jars(cls) -> list[Path]:
        folder = cls._plug_in()
        return list((folder / "target").glob(f"{folder.name}-*.jar"))

    @classmethod
    def _released(cls) -> list[str]:
        """Return the class path that scripts/fetch_peers has written."""
        fetched = ROOT / ".java" / f"{cls.name.lower()}-broker-classpath"
        return fetched.read_text().strip().split(":") if fetched.exists() else [str(fetched)]

    def _java(self, name: str, main: str, *words: object, more: Sequence[Path] = ()) -> Child:
        """Start a program of the released classes, and `more` after them."""
        class_path = ":".join([*self._released(), *map(str, more)])
        command = [
            *(*_TO_THE_LOG, str(self._java_home / "bin" / "java"), *_SHORT_LIVED),
            *(*self.java_options, f"-Duser.home={self._folder}", "-cp", class_path, main),
            *map(str, words),
        ]
        env = {**self._endpoint.env, "ROCKETMQ_HOME": str(self._folder)}
        child = start_child(name, command, self._folder / f"{name}.log", env)
        self._children.append(child)
        return child

    def _wait_for_end(self, child: Child) -> None:
        steps.wait_until(lambda: not child.is_running, f"{child.name} does not end", TIMEOUT_S)
        if child.process.returncode != 0:
            raise RuntimeError(f"{child.name} of {self.name} failed:\n{child.log_tail()}")

    def _wait_for_port(self, port: int, child: Child) -> None:
        def listens() -> bool:
            if not child.is_running:
                raise RuntimeError(f"{child.name} of {self.name} ended:\n{child.log_tail()}")
            with socket.socket() as probe:
                return probe.connect_ex((LOCALHOST, port)) == 0

        steps.wait_until(listens, f"{child.name} of {self.name} does not listen", TIMEOUT_S)

    def _write_settings(self, name: str, settings: Mapping[str, object], shown: str = "") -> Path:
        """Write a file of settings after those that an example has `shown`."""
        path = self._folder / name
        lines = (f"{option}={value}\n" for option, value in settings.items())
        path.write_text(f"{shown}\n{''.join(lines)}")
        return path

    def _example(self, name: str) -> str:
        return (self._plug_in() / "example" / name).read_text()

    def _tls(self, prefix: str = "") -> Mapping[str, Path]:
        tls = self._caller.tls
        files = {"ca": tls.ca, "certificate": tls.certificate, "key": tls.key}
        return {f"{prefix}tls.{option}": path for option, path in files.items()}
