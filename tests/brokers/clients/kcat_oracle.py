"""The operations of a file by kcat: prints one JSON array, a result for each.

kcat makes no topics: those are made by confluent-kafka. It tells neither where its records went nor
which offsets a group has, so these are read back. An operation that fails gives what kcat said.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

SERVERS, PROGRAM = sys.argv[1], sys.argv[3]
PATIENCE_S = 60
OUT_OF_RANGE = "Offset out of range"

Asked = dict[str, Any]


class FailedError(Exception):
    """kcat has failed."""


def kcat(*words: str, given: bytes = b"") -> str:
    """Run kcat; return what it printed."""
    command = [PROGRAM, "-b", SERVERS, "-q", *words]
    ended = subprocess.run(
        command, input=given, capture_output=True, timeout=PATIENCE_S, check=False
    )
    said = ended.stderr.decode(errors="replace")
    if ended.returncode != 0 or OUT_OF_RANGE in said:
        raise FailedError(OUT_OF_RANGE if OUT_OF_RANGE in said else said)
    return ended.stdout.decode()


def brokers(_: Asked) -> Any:
    """Return the number of brokers."""
    return len(json.loads(kcat("-L", "-J"))["brokers"])


def create(asked: Asked) -> Any:
    """Create a topic."""
    wanted = NewTopic(asked["topic"], asked["partitions"], 1)
    admin = AdminClient({"bootstrap.servers": SERVERS})
    admin.create_topics([wanted])[asked["topic"]].result(60)
    return "done"


def describe(asked: Asked) -> Any:
    """Return the number of partitions."""
    (found,) = json.loads(kcat("-L", "-J", "-t", asked["topic"]))["topics"]
    return len(found["partitions"])


def produce(asked: Asked) -> Any:
    """Produce records with keys; one without a value is a null."""
    lines = "".join(f"{key}\t{value or ''}\n" for _, key, value in asked["records"])
    settings = (
        *("-X", f"acks={asked['acks']}", "-z", asked["compression"]),
        *("-X", f"enable.idempotence={str(asked['idempotent']).lower()}"),
    )
    words = ("-P", "-t", asked["topic"], "-p", str(asked["partition"]), "-K", "\t", "-Z")
    return kcat(*words, *settings, given=lines.encode())


def consume(asked: Asked) -> Any:
    """Consume so many records from an offset or the beginning."""
    place = ("-t", asked["topic"], "-p", str(asked["partition"]))
    at = str(asked.get("from", "beginning"))
    settings = ("-X", "auto.offset.reset=error")
    return _rows(kcat("-C", *place, "-o", at, "-c", str(asked["count"]), "-J", *settings))


def offset(asked: Asked) -> Any:
    """Return the first or the next offset."""
    at = {"earliest": "-2", "latest": "-1"}.get(str(asked["at"]), str(asked["at"]))
    return kcat("-Q", "-t", f"{asked['topic']}:{asked['partition']}:{at}")


def group(asked: Asked) -> Any:
    """Consume as a group of one member, to the ends of all partitions, twice."""
    settings = ("-X", "auto.offset.reset=earliest", "-X", "session.timeout.ms=10000")
    words = ("-G", asked["group"], "-e", "-J", *settings, asked["topic"])
    return [sorted(_rows(kcat(*words))) for _ in range(2)]


def _rows(lines: str) -> list[Any]:
    found = [json.loads(line) for line in lines.splitlines()]
    return [[row["partition"], row["offset"], row["key"], row["payload"]] for row in found]


def main() -> None:
    """Run all operations."""
    results: list[Any] = []
    for asked in json.loads(Path(sys.argv[2]).read_text()):
        try:
            results.append(globals()[asked["op"]](asked))
        except FailedError as error:
            results.append({"error": str(error)})
    print(json.dumps(results))


main()
