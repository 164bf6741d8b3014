"""Operations that stock clients run against this product's broker and against Apache Kafka."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Operation = dict[str, Any]

BATCH = 4
"""Records of one produced batch."""
PARTITIONS = 4

_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@dataclass(frozen=True)
class Operations:
    """The operations of one client, with topics and a group of its own.

    Records have times from `base_ms` on. An operation with `fails` has to fail; one with `until` is
    repeated until that is its result, since Apache Kafka's metadata come a moment late.
    """

    client: str
    base_ms: int

    def all(self) -> list[Operation]:
        """Return the operations in their order."""
        written = self._written(_CODECS)
        end = BATCH * len(written)
        return [
            {"op": "brokers"},
            *self._topics(),
            {"op": "offset", **self._place, "at": "latest"},
            *written,
            *self._reads(end),
            *self._groups(),
            *self._deletions(end),
        ]

    def of_a_simple_tool(self) -> list[Operation]:
        """Return operations of a client that has no settings of topics, and sets no times."""
        written = self._written(_CODECS)
        end = BATCH * len(written)
        place = self._place
        return [
            {"op": "brokers"},
            {"op": "create", "topic": self._topic, "partitions": 2},
            {"op": "describe", "topic": self._topic},
            *written,
            {"op": "consume", **place, "count": end},
            {"op": "consume", **place, "count": end - 6, "from": 6},
            {"op": "consume", **place, "count": 1, "from": end + 100, "fails": True},
            {"op": "offset", **place, "at": "earliest"},
            {"op": "offset", **place, "at": "latest"},
            {"op": "offset", **place, "at": self.base_ms},
            {"op": "group", "topic": self._topic, "group": f"readers-{self.client}"},
        ]

    @property
    def _topic(self) -> str:
        return f"compared-{self.client}"

    @property
    def _grown(self) -> str:
        return f"grown-{self.client}"

    @property
    def _place(self) -> Operation:
        return {"topic": self._topic, "partition": 0}

    def _topics(self) -> list[Operation]:
        configs = {"retention.ms": "7200000", "segment.bytes": "1048576"}
        read = {"op": "configs", "topic": self._topic}
        failing: list[Operation] = [
            {"op": "create", "topic": self._topic, "partitions": 2},
            {"op": "create", "topic": "not a name", "partitions": 2},
            {"op": "create", "topic": "none", "partitions": 0},
            {"op": "create", "topic": "odd", "partitions": 1, "configs": {"no.setting": "1"}},
            {"op": "create", "topic": "odd", "partitions": 1, "configs": {"retention.ms": "x"}},
            {"op": "grow", "topic": self._grown, "partitions": 2},
            {"op": "describe", "topic": "absent"},
        ]
        return [
            {"op": "create", "topic": self._topic, "partitions": 2, "configs": configs},
            {"op": "create", "topic": self._grown, "partitions": 1},
            {"op": "grow", "topic": self._grown, "partitions": PARTITIONS},
            {"op": "describe", "topic": self._grown, "until": PARTITIONS},
            {**read, "names": ["retention.ms", "segment.bytes", "retention.bytes"]},
            {**read, "names": ["cleanup.policy", "max.message.bytes", "compression.type"]},
            *({**operation, "fails": True} for operation in failing),
        ]

    def _written(self, codecs: Sequence[str]) -> list[Operation]:
        """Return a batch for each codec and number of acknowledgements, and idempotent ones."""
        kinds = [(codec, acks, False) for codec in codecs for acks in ("1", "all", "0")]
        kinds += [(codec, "all", True) for codec in codecs]
        return [self._batch(at, *kind) for at, kind in enumerate(kinds)]

    def _batch(self, number: int, codec: str, acks: str, is_idempotent: bool) -> Operation:
        first_ms = self.base_ms + 1000 * number * BATCH
        rows = [
            (first_ms + 1000 * at, f"key {at}", None if at == 2 else f"{codec} {at}")
            for at in range(BATCH)
        ]
        return {
            "op": "produce",
            **self._place,
            "acks": acks,
            "compression": codec,
            "idempotent": is_idempotent,
            "records": rows,
        }

    def _reads(self, end: int) -> list[Operation]:
        base_ms, place = self.base_ms, self._place
        times = (base_ms - 1, base_ms, base_ms + 1500, base_ms + 1000 * end - 1000)
        return [
            {"op": "consume", **place, "count": end},
            {"op": "consume", **place, "count": end - 6, "from": 6},
            {"op": "consume", **place, "count": 1, "from": end + 100, "fails": True},
            *({"op": "offset", **place, "at": at} for at in ("earliest", "latest", *times)),
            {"op": "offset", **place, "at": base_ms + 1000 * end},
            {"op": "offset", "topic": self._topic, "partition": 1, "at": "latest"},
        ]

    def _groups(self) -> list[Operation]:
        keyed = [(self.base_ms + at, f"name {at}", f"value {at}") for at in range(60)]
        named: Operation = {"topic": self._grown, "group": f"readers-{self.client}"}
        ends = [
            {"op": "offset", "topic": self._grown, "partition": at, "at": "latest"}
            for at in range(PARTITIONS)
        ]
        return [
            {
                "op": "produce",
                "topic": self._grown,
                "acks": "all",
                "compression": "none",
                "idempotent": True,
                "records": keyed,
            },
            *ends,
            {"op": "group", **named, "partitions": PARTITIONS, "count": len(keyed)},
            {"op": "committed", **named},
            {"op": "group_state", **named},
            {"op": "committed", "topic": self._grown, "group": f"never-{self.client}"},
        ]

    def _deletions(self, end: int) -> list[Operation]:
        place = self._place
        return [
            {"op": "delete_records", **place, "before": 9},
            {"op": "delete_records", **place, "before": end + 1, "fails": True},
            {"op": "offset", **place, "at": "earliest"},
            {"op": "consume", **place, "count": 1, "from": 0, "fails": True},
            {"op": "consume", **place, "count": end - 9},
            {"op": "delete_records", **place, "before": -1},
            {"op": "offset", **place, "at": "earliest"},
            {"op": "delete", "topic": self._grown},
            {"op": "delete", "topic": self._grown, "fails": True},
        ]
