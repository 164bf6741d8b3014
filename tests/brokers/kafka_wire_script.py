"""Requests of Kafka's protocol that stock clients do not send by themselves, and what is answered.

Repeated, late and damaged batches, epochs, wrong offsets, members that are not known: each gives
error codes and offsets, which have to be those of Apache Kafka.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from tests.kit.kafka_batches import Rec, make_batch
from tests.kit.kafka_wire import Tree, WireClient

TOPIC = "wire"
PATIENCE_MS = 60_000
SESSION_MS = 10_000
PRODUCE, FETCH, LIST_OFFSETS = (0, 8), (1, 11), (2, 5)
OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR = (8, 7), (9, 5), (10, 2)
JOIN, HEARTBEAT, LEAVE, SYNC = (11, 5), (12, 3), (13, 2), (14, 3)
CREATE_TOPICS, DELETE_TOPICS, DELETE_RECORDS = (19, 4), (20, 3), (21, 1)
INIT_PRODUCER_ID, EPOCH_ENDS, CREATE_PARTITIONS = (22, 1), (23, 3), (37, 1)
DESCRIBE_CLUSTER = (60, 1)

_LOADING = (14, 15, 16)
"""Errors of a coordinator that is not ready."""

Observation = tuple[str, object]


class Script:
    """Runs all requests against one broker."""

    def __init__(self, client: WireClient, now_ms: int) -> None:
        self._client = client
        self._now_ms = now_ms

    def observations(self) -> Iterator[Observation]:
        """Yield the name of each step and what came of it."""
        made = {"name": TOPIC, "num_partitions": 1, "replication_factor": 1}
        self._call(CREATE_TOPICS, topics=[made], timeout=PATIENCE_MS)
        self._wait_for_leader()
        yield from self._batches()
        yield from self._producers()
        yield from self._reads()
        yield from self._groups()
        yield from self._topics()

    def _call(self, api: tuple[int, int], **tree: Any) -> Any:
        return self._client.call(*api, tree)

    def _wait_for_leader(self) -> None:
        while self._offset(-1)[0] != 0:
            pass

    # -- batches

    def _batches(self) -> Iterator[Observation]:
        good = self._batch()
        yield "good batch", self._produce(good)
        yield "bad checksum", self._produce(good[:-1] + bytes([good[-1] ^ 1]))
        yield "cut batch", self._produce(good[:-5])
        yield "head alone", self._produce(good[:30])
        yield "batch too large", self._produce(self._batch(value=bytes(1_100_000)))
        yield "two batches", self._produce(good + good)
        yield "unknown partition", self._produce(good, partition=7)
        yield "unknown topic", self._produce(good, topic="absent")
        yield "acks 5", self._produce(good, acks=5)
        yield "count above last offset", self._produce(self._batch(record_count=2))
        yield "control batch", self._produce(self._batch(attributes=0x20))
        yield "end", self._offset(-1)

    def _batch(self, value: bytes = b"value", **fields: Any) -> bytes:
        return make_batch([Rec(self._now_ms, b"key", value)], **fields)

    def _produce(
        self, batch: bytes, *, topic: str = TOPIC, partition: int = 0, acks: int = -1
    ) -> object:
        rows = [{"index": partition, "records": batch}]
        answer = self._call(
            PRODUCE,
            transactional_id=None,
            acks=acks,
            timeout=PATIENCE_MS,
            topic_data=[{"name": topic, "partition_data": rows}],
        )
        row = answer.responses[0].partition_responses[0]
        return int(row.error_code), row.base_offset

    # -- idempotent producers

    def _producers(self) -> Iterator[Observation]:
        given = self._producer_id()
        yield "producer id", (int(given.error_code), given.producer_epoch)

        def sent(sequence: int, epoch: int = 0) -> object:
            batch = self._batch(
                producer_id=given.producer_id, producer_epoch=epoch, base_sequence=sequence
            )
            return self._produce(batch)

        for sequence in range(6):
            yield f"sequence {sequence}", sent(sequence)
        yield "newest again", sent(5)
        yield "fifth newest again", sent(1)
        yield "sixth newest again", sent(0)
        yield "gap", sent(8)
        yield "epoch 1 begins late", sent(3, epoch=1)
        yield "epoch 1", sent(0, epoch=1)
        yield "epoch 0 is over", sent(6)
        yield "end behind producers", self._offset(-1)

    def _producer_id(self) -> Any:
        """Return a producer id once there is one: Apache Kafka loads its first."""
        while True:
            given = self._call(
                INIT_PRODUCER_ID, transactional_id=None, transaction_timeout=SESSION_MS
            )
            if given.error_code not in _LOADING:
                return given

    # -- reads

    def _reads(self) -> Iterator[Observation]:
        for offset, epoch in ((0, -1), (3, 0), (99, -1), (-5, -1), (0, 4)):
            yield f"fetch {offset} at epoch {epoch}", self._fetch(offset, epoch)
        yield "fetch of an unknown partition", self._fetch(0, -1, partition=7)
        for time in (-1, -2, self._now_ms, self._now_ms + 1):
            for epoch in (-1, 0, 4):
                name = f"offset at {min(time - self._now_ms, 1)} in epoch {epoch}"
                yield name, self._offset(time, epoch)
        for current, asked in ((0, 0), (-1, 0), (0, 3), (4, 0), (-1, -1)):
            yield f"end of epoch {asked} at {current}", self._epoch_end(current, asked)
        yield "delete unknown", self._delete(1, partition=7)
        yield "delete behind the end", self._delete(99)
        yield "delete", self._delete(2)
        yield "delete what is deleted", self._delete(1)
        yield "fetch deleted", self._fetch(0, -1)
        yield "first offset", self._offset(-2)

    def _fetch(self, offset: int, epoch: int, partition: int = 0) -> object:
        wanted = {
            "partition": partition,
            "current_leader_epoch": epoch,
            "fetch_offset": offset,
            "log_start_offset": -1,
            "partition_max_bytes": 1,
        }
        answer = self._call(
            FETCH,
            replica_id=-1,
            max_wait=0,
            min_bytes=0,
            max_bytes=1 << 20,
            isolation_level=0,
            session_id=0,
            session_epoch=-1,
            topics=[{"topic": TOPIC, "partitions": [wanted]}],
            forgotten_topics_data=(),
            rack_id="",
        )
        row = answer.responses[0].partitions[0]
        batch = bytes(row.records or b"")
        found = struct.unpack_from(">qii", batch) if batch else None
        return int(row.error_code), row.high_watermark, row.log_start_offset, found

    def _offset(self, time: int, epoch: int = -1) -> tuple[int, int, int]:
        wanted = {"partition_index": 0, "current_leader_epoch": epoch, "timestamp": time}
        topics = [{"name": TOPIC, "partitions": [wanted]}]
        answer = self._call(LIST_OFFSETS, replica_id=-1, isolation_level=0, topics=topics)
        row = answer.topics[0].partitions[0]
        return int(row.error_code), row.offset, row.leader_epoch

    def _epoch_end(self, current: int, asked: int) -> object:
        wanted = {"partition": 0, "current_leader_epoch": current, "leader_epoch": asked}
        topics = [{"topic": TOPIC, "partitions": [wanted]}]
        answer = self._call(EPOCH_ENDS, replica_id=-1, topics=topics)
        row = answer.topics[0].partitions[0]
        return int(row.error_code), row.leader_epoch, row.end_offset

    def _delete(self, below: int, partition: int = 0) -> object:
        topics = [{"name": TOPIC, "partitions": [{"partition_index": partition, "offset": below}]}]
        answer = self._call(DELETE_RECORDS, topics=topics, timeout=PATIENCE_MS)
        row = answer.topics[0].partitions[0]
        return int(row.error_code), row.low_watermark

    # -- groups

    def _groups(self) -> Iterator[Observation]:
        while self._call(FIND_COORDINATOR, key="g", key_type=0).error_code:
            pass  # Apache Kafka makes its topic of offsets now
        while self._join("").error_code in _LOADING:
            pass
        yield "join without id", int(self._join("").error_code)
        yield "join with an unknown id", int(self._join("somebody").error_code)
        yield "join without a group", int(self._join("", group="").error_code)
        member = {"group_id": "g", "generation_id": 1, "member_id": "nobody"}
        member |= {"group_instance_id": None}
        yield "heartbeat of nobody", int(self._call(HEARTBEAT, **member).error_code)
        synced = self._call(SYNC, **member, assignments=())
        yield "sync of nobody", int(synced.error_code)
        gone = self._call(LEAVE, group_id="g", member_id="nobody")
        yield "leave of nobody", int(gone.error_code)
        yield "commit of nobody", self._commit("g", 1, "nobody", 0)
        yield "commit without a group", self._commit("simple", -1, "", 0)
        yield "committed", self._committed("simple")
        yield "committed of no group", self._committed("never")

    def _join(self, member_id: str, group: str = "g") -> Any:
        return self._call(
            JOIN,
            group_id=group,
            session_timeout=SESSION_MS,
            rebalance_timeout=SESSION_MS,
            member_id=member_id,
            group_instance_id=None,
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b""}],
        )

    def _commit(self, group: str, generation: int, member: str, partition: int) -> object:
        row = {"partition_index": partition, "committed_offset": 5, "committed_metadata": "note"}
        topic: Tree = {"name": TOPIC, "partitions": [{**row, "committed_leader_epoch": -1}]}
        answer = self._call(
            OFFSET_COMMIT,
            group_id=group,
            generation_id_or_member_epoch=generation,
            member_id=member,
            group_instance_id=None,
            topics=[topic],
        )
        return int(answer.topics[0].partitions[0].error_code)

    def _committed(self, group: str) -> object:
        topics = [{"name": TOPIC, "partition_indexes": [0]}]
        answer = self._call(OFFSET_FETCH, group_id=group, topics=topics)
        row = answer.topics[0].partitions[0]
        return int(row.error_code), row.committed_offset, row.metadata

    # -- topics

    def _topics(self) -> Iterator[Observation]:
        absent = {"name": "absent", "count": 3, "assignments": None}
        grown = self._call(
            CREATE_PARTITIONS, topics=[absent], timeout=PATIENCE_MS, validate_only=False
        )
        yield "absent topic grows", int(grown.results[0].error_code)
        wanted = {"name": "checked", "num_partitions": 1, "replication_factor": 1}
        for endpoint_type in (1, 2):
            found = self._call(
                DESCRIBE_CLUSTER,
                include_cluster_authorized_operations=False,
                endpoint_type=endpoint_type,
            )
            outcome = int(found.error_code), found.endpoint_type, len(found.brokers)
            yield f"cluster by endpoint type {endpoint_type}", outcome
        checked = self._call(
            CREATE_TOPICS, topics=[wanted], timeout=PATIENCE_MS, validate_only=True
        )
        yield "checked topic", int(checked.topics[0].error_code)
        for name in ("checked", TOPIC):
            gone = self._call(DELETE_TOPICS, topic_names=[name], timeout=PATIENCE_MS)
            yield f"{name} is deleted", int(gone.responses[0].error_code)
