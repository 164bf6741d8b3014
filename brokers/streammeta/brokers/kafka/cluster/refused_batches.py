"""Rejected batches of idempotent producers: no later batch in flight may overtake them.

A producer has up to five batches of a partition in flight. Suppose the first is rejected because
its partition is not open here yet, and the second is accepted a moment later. Then the producer
concludes from the second acknowledgement that the first batch is stored too, and librdkafka reports
it as delivered. Therefore batches in flight after a rejected one are also rejected, until the
producer resends.
"""

from __future__ import annotations

from collections import OrderedDict

from streammeta.brokers.partition.errors import CorruptBatchError
from streammeta.brokers.partition.record_batch import read_batches

IN_FLIGHT = 5
"""Maximum batches in flight per producer and partition. Clients do not allow more."""
TOPIC_MAX = 249
"""Maximum length of a topic's name. Longer ones are not remembered."""
PRODUCERS_MAX = 10_000
"""Maximum remembered producers, by partition. The oldest rejection is dropped first."""

_HALF = 2**30

Key = tuple[str, int, int, int]
"""Topic, partition, producer id and epoch."""


class RefusedBatches:
    """First sequences of rejected batches, with the number that may still follow each in flight."""

    def __init__(self, producers_max: int = PRODUCERS_MAX) -> None:
        self._producers_max = producers_max
        self._refused: OrderedDict[Key, dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refused)

    def note(self, topic: str, partition: int, records: bytes) -> None:
        """Record the rejection of a batch that its producer will retry."""
        found = _parse_sequence(topic, partition, records)
        if found is None:
            return
        key, sequence = found
        self._refused.setdefault(key, {})[sequence] = IN_FLIGHT - 1
        self._refused.move_to_end(key)
        if len(self._refused) > self._producers_max:
            self._refused.popitem(last=False)

    def is_overtaking(self, topic: str, partition: int, records: bytes) -> bool:
        """Return whether a batch was in flight after a rejected one, and has to be rejected too.

        A resent batch is not: its producer knows of the rejection, and sends in order.
        """
        found = _parse_sequence(topic, partition, records)
        if found is None or found[0] not in self._refused:
            return False
        key, sequence = found
        refused = self._refused[key]
        # Sequences wrap around at 2**31, so the nearer half of the circle counts as later.
        is_behind = any(0 < (sequence - first) % 2**31 < _HALF for first in refused)
        # A resent batch, or one before the gap: the producer has learned of the rejection.
        if sequence in refused or not is_behind:
            del self._refused[key]
            return False
        self._refused[key] = {first: left - 1 for first, left in refused.items() if left > 1}
        return True


def _parse_sequence(topic: str, partition: int, records: bytes) -> tuple[Key, int] | None:
    """Return a batch's key and first sequence, None without a producer or with a long name."""
    # Such a topic can't exist, and a client must not fill the memory with names.
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
