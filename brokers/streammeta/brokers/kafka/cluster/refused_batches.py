"""Batches of idempotent producers that were refused: none that was sent after them overtakes them.

A producer has up to five batches of a partition under way. When the first is refused, since its
partition is not open here yet, and the second is taken a moment later, the producer learns that the
second is stored and concludes that the first is: librdkafka then reports it as delivered. So what
was under way behind a refused batch is refused as well, until the producer begins anew.
"""

from __future__ import annotations

from collections import OrderedDict

from streammeta.brokers.partition.errors import CorruptBatchError
from streammeta.brokers.partition.record_batch import read_batches

IN_FLIGHT = 5
"""Batches of a producer and partition that may be under way; clients allow no more."""
TOPIC_MAX = 249
"""Longest name of a topic: no longer one is remembered, whatever a client may send."""
PRODUCERS_MAX = 10_000
"""Producers, by partition, that are remembered: those that were refused last."""

_HALF = 2**30

Key = tuple[str, int, int, int]
"""Topic, partition, producer id and epoch."""


class RefusedBatches:
    """First sequences of batches refused of late, with the number that may still be behind each."""

    def __init__(self, producers_max: int = PRODUCERS_MAX) -> None:
        self._producers_max = producers_max
        self._refused: OrderedDict[Key, dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refused)

    def note(self, topic: str, partition: int, records: bytes) -> None:
        """Note that a batch is refused, for a reason that its producer tries it again for."""
        found = _sequenced(topic, partition, records)
        if found is None:
            return
        key, sequence = found
        self._refused.setdefault(key, {})[sequence] = IN_FLIGHT - 1
        self._refused.move_to_end(key)
        if len(self._refused) > self._producers_max:
            self._refused.popitem(last=False)

    def is_overtaking(self, topic: str, partition: int, records: bytes) -> bool:
        """Return whether a batch was under way behind a refused one, and is to be refused too.

        One that comes again is not: its producer knows of the refusal, and sends in order.
        """
        found = _sequenced(topic, partition, records)
        if found is None or found[0] not in self._refused:
            return False
        key, sequence = found
        refused = self._refused[key]
        is_behind = any(0 < (sequence - one) % 2**31 < _HALF for one in refused)
        if sequence in refused or not is_behind:
            del self._refused[key]
            return False
        self._refused[key] = {one: left - 1 for one, left in refused.items() if left > 1}
        return True


def _sequenced(topic: str, partition: int, records: bytes) -> tuple[Key, int] | None:
    """Return whose batch it is and its first sequence; None if it has no producer or topic."""
    if len(topic) > TOPIC_MAX:
        return None
    try:
        batches = read_batches(records)
    except CorruptBatchError:
        return None
    if len(batches) != 1 or batches[0].producer_id < 0:
        return None
    (batch,) = batches
    return (topic, partition, batch.producer_id, batch.producer_epoch), batch.base_sequence
