"""Rules of the sections of idempotent producers, which `rules` combines with the others."""

from collections.abc import Mapping

import numpy as np

from streammeta.controller.metadata.registries.producers import BATCHES_KEPT
from streammeta.controller.metadata.tables.section_checks import (
    Ascending,
    Between,
    Columns,
    Holds,
    Loaded,
    OneRow,
    Rule,
    require,
)
from streammeta.controller.metadata.tables.values import INT32_MAX, INT64_MAX, Mask


class _BatchesOfProducers:
    """Each producer has batches, at most `BATCHES_KEPT`, grouped in the order of producers."""

    is_local = False

    def check(self, section: str, loaded: Loaded) -> None:
        """Check the rule, see `Rule`."""
        batches, producers = loaded[section], loaded["producers"]
        begins = ~_is_same_pair(batches)
        first = np.flatnonzero(begins)
        groups = np.cumsum(begins) - 1
        wanted = np.minimum(groups, max(len(producers["stream_id"]) - 1, 0))
        for field in ("stream_id", "producer_id"):
            values, known = batches[field], producers[field]
            good = groups < len(known)
            if len(known):
                good &= values == known[wanted]
            require(section, field, good, values, "of the producer whose batches follow here")

        known = producers["stream_id"]
        good = np.arange(len(known)) < len(first)
        require("producers", "stream_id", good, known, "in 'producer_batches', as it has a batch")
        place = np.arange(len(groups)) - first[groups]
        ids = batches["producer_id"]
        most = f"in at most {BATCHES_KEPT} rows for each stream"
        require(section, "producer_id", place < BATCHES_KEPT, ids, most)


def _is_same_pair(batches: Columns) -> Mask:
    """Return which batches have the stream and producer of the row before."""
    streams, producers = batches["stream_id"], batches["producer_id"]
    same = np.zeros(len(streams), dtype=np.bool_)
    same[1:] = (streams[1:] == streams[:-1]) & (producers[1:] == producers[:-1])
    return same


def _sequences_follow(batches: Columns, _: Loaded) -> Mask:
    first, count = batches["first_sequence"], batches["record_count"]
    good = ~_is_same_pair(batches)
    good[1:] |= first[1:] == (first[:-1] + count[:-1]) & INT32_MAX
    return good


def _offsets_ascend(batches: Columns, _: Loaded) -> Mask:
    good = ~_is_same_pair(batches)
    good[1:] |= batches["start_offset"][1:] > batches["start_offset"][:-1]
    return good


PRODUCER_SECTIONS: Mapping[str, tuple[tuple[str, ...], tuple[Rule, ...]]] = {
    "producer_ids": (
        ("next_producer_id",),
        (OneRow(), Between("next_producer_id", 0, INT64_MAX)),
    ),
    "producers": (
        ("stream_id", "producer_id", "producer_epoch", "last_used_ms"),
        (
            Ascending(("stream_id", "producer_id")),
            Between("stream_id", 0, "next_stream_id"),
            Between("producer_id", 0, INT64_MAX),
            Between("producer_epoch", 0, INT32_MAX),
            Between("last_used_ms", 0, INT64_MAX),
        ),
    ),
    "producer_batches": (
        ("stream_id", "producer_id", "first_sequence", "record_count", "start_offset"),
        (
            Between("first_sequence", 0, INT32_MAX),
            Between("record_count", 1, INT32_MAX),
            Between("start_offset", 0, INT64_MAX),
            _BatchesOfProducers(),
            Holds("first_sequence", "the sequence after the row before", _sequences_follow),
            Holds("start_offset", "above that of the row before", _offsets_ascend),
        ),
    ),
}
"""Columns and rules, as in `rules.SECTIONS`."""
