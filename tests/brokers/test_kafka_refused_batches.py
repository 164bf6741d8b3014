"""No batch of a producer overtakes one that was refused before it."""

from __future__ import annotations

from typing import Any, cast

from streammeta.brokers.kafka.calls import record_calls
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.refused_batches import IN_FLIGHT, RefusedBatches
from streammeta.brokers.kafka.protocol.codes import Code, KafkaError
from streammeta.brokers.kafka.protocol.tally import BrokerTally
from streammeta.brokers.kafka.protocol.wire import Request, read_request
from streammeta.brokers.partition.log import PartitionLog
from streammeta.brokers.partition.opening import create_meta_stream, open_log, partition_tags
from tests.kit.kafka_batches import plain, sequenced
from tests.kit.kafka_wire import produce_tree, request_bytes
from tests.kit.memory_streams import MemoryStreams

_PRODUCER = 7


class Leader:
    """A broker that leads one partition, once it is open here."""

    def __init__(self, log: PartitionLog) -> None:
        self.log: PartitionLog | None = None
        self._log = log
        self.refused = RefusedBatches()
        self.tally = BrokerTally()

    def served(self, *_: Any) -> PartitionLog:
        if self.log is None:
            raise KafkaError(Code.NOT_LEADER_OR_FOLLOWER)
        return self.log

    def open(self) -> None:
        self.log = self._log

    async def produce(self, records: bytes) -> tuple[Code, int]:
        answer = await record_calls.produce(cast(Broker, self), _request(records))
        tree: Any = await answer
        (row,) = tree["responses"][0]["partition_responses"]
        return row["error_code"], row["base_offset"]


def _request(records: bytes) -> Request:
    return read_request(request_bytes(0, 8, produce_tree({0: records})))


async def _leader() -> Leader:
    streams = MemoryStreams()
    meta_id = await create_meta_stream(streams, "topic", 0)
    return Leader(await open_log(streams, meta_id, 0, partition_tags("topic", 0)))


def _batch(first: int) -> bytes:
    return sequenced(_PRODUCER, 0, first, 10)


_REFUSED = (Code.NOT_LEADER_OR_FOLLOWER, -1)


async def test_what_was_sent_behind_a_refused_batch_is_refused_until_that_comes_again() -> None:
    leader = await _leader()
    assert await leader.produce(_batch(0)) == _REFUSED
    leader.open()
    for first in (10, 20, 30, 40):
        assert await leader.produce(_batch(first)) == _REFUSED
    answers = [await leader.produce(_batch(first)) for first in (0, 10, 20, 30, 40)]
    assert answers == [(Code.NONE, first) for first in (0, 10, 20, 30, 40)]
    assert len(leader.refused) == 0


async def test_others_are_not_kept_back() -> None:
    leader = await _leader()
    assert await leader.produce(_batch(0)) == _REFUSED
    leader.open()
    assert await leader.produce(plain("a")) == (Code.NONE, 0)
    assert await leader.produce(sequenced(_PRODUCER + 1, 0, 50)) == (Code.NONE, 1)
    assert await leader.produce(sequenced(_PRODUCER, 1, 50)) == (Code.NONE, 2)
    assert (await leader.produce(b"no batch"))[0] is Code.INVALID_RECORD


def test_no_more_are_refused_than_can_be_under_way() -> None:
    refused = RefusedBatches()
    refused.note("t", 0, _batch(0))
    behind = [refused.is_overtaking("t", 0, _batch(10 * n)) for n in range(1, IN_FLIGHT + 1)]
    assert behind == [True] * (IN_FLIGHT - 1) + [False]


def test_producer_that_went_elsewhere_and_came_back_is_refused_once() -> None:
    refused = RefusedBatches()
    refused.note("t", 0, _batch(0))
    assert refused.is_overtaking("t", 0, _batch(500))
    refused.note("t", 0, _batch(500))
    assert not refused.is_overtaking("t", 0, _batch(500))


def test_sequences_that_wrap_are_told_apart() -> None:
    refused = RefusedBatches()
    refused.note("t", 0, _batch(2**31 - 10))
    assert refused.is_overtaking("t", 0, _batch(0))
    refused.note("t", 0, _batch(0))
    assert not refused.is_overtaking("t", 0, _batch(2**31 - 10))


def test_only_so_many_producers_are_remembered() -> None:
    refused = RefusedBatches(producers_max=2)
    for producer in (1, 2, 3):
        refused.note("t", 0, sequenced(producer, 0, 0))
    assert [refused.is_overtaking("t", 0, sequenced(number, 0, 1)) for number in (1, 2, 3)] == [
        False,
        True,
        True,
    ]
