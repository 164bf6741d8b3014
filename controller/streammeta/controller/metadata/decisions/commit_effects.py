"""Effects of commits: values put and streams trimmed, all together with the commit or not at all.

They are decided once the commit itself is accepted, against the state before it, by the rules of
PutKVs and TrimStreams, and their records follow the commit's records. A rejected effect rejects the
commit. A repeat changes nothing, because the effects were applied together with the first commit.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api.answers import (
    CommitStreamObjectAnswer,
    CommitStreamSetObjectAnswer,
    KVResult,
)
from streammeta.controller.metadata.api.requests import CommitStreamObject, CommitStreamSetObject
from streammeta.controller.metadata.decisions.commit_rules import failed_commit
from streammeta.controller.metadata.registries.cluster_modes import FeatureLevel
from streammeta.controller.metadata.registries.kv import KVs
from streammeta.controller.metadata.registries.stream_decisions import StreamDecisions
from streammeta.controller.records import record as rec

EFFECTS_LEVEL = 3
"""Feature level from which commits may have effects. Leaders below it do not know them."""

Commit: TypeAlias = CommitStreamSetObject | CommitStreamObject
CommitAnswer: TypeAlias = CommitStreamSetObjectAnswer | CommitStreamObjectAnswer
Decided: TypeAlias = tuple[Sequence[rec.Record], CommitAnswer]


class CommitEffects:
    """Adds the effects of commits to the decisions on the commits."""

    def __init__(self, streams: StreamDecisions, kvs: KVs, level: FeatureLevel) -> None:
        self._streams = streams
        self._kvs = kvs
        self._level = level

    def add_effects(
        self,
        request: Commit,
        records: Sequence[rec.Record],
        answer: CommitAnswer,
        offset: int,
    ) -> Decided:
        """Return records and answer including the effects. `offset` is the records' log offset.

        Raises:
            FeatureLevelError: the cluster is below `EFFECTS_LEVEL`.
            LimitExceededError: the conflicting values exceed one answer.
        """
        if not (request.kv_puts or request.trims):
            return records, answer
        self._level.require(EFFECTS_LEVEL, "kv_puts and trims of a commit")

        if answer.error is not ErrorCode.NONE:
            return records, answer
        # An accepted commit without records is a repeat.
        if not records:
            results = self._kvs.list_earlier_puts(request.kv_puts)
            done = (ErrorCode.NONE,) * len(request.trims)
            starts = self._streams.starts_of([item.stream_id for item in request.trims])
            return records, replace(
                answer, kv_results=results, trim_errors=done, trim_start_offsets=starts
            )

        put, results = self._kvs.decide_put_all(request.kv_puts, offset)
        trimmed, errors, starts = self._streams.trim_of_node(
            request.node.node_id, request.trims, _raised_ends(records)
        )

        error = _find_first_error(results, errors)
        if error is not ErrorCode.NONE:
            return (), replace(_rejection(request, error), kv_results=results, trim_errors=errors)

        effects = [*([put] if request.kv_puts else ()), *trimmed]
        return (*records, *effects), replace(
            answer, kv_results=results, trim_errors=errors, trim_start_offsets=starts
        )


def _raised_ends(records: Sequence[rec.Record]) -> dict[int, int]:
    """Return the largest end of each stream in the objects that records commit."""
    ends: dict[int, int] = {}
    for record in records:
        if isinstance(record, rec.StreamSetObjectsCommitted):
            rows: rec.StreamSetObjectRanges | rec.StreamObjectsCommitted = record.ranges
        elif isinstance(record, rec.StreamObjectsCommitted):
            rows = record
        else:
            continue
        pairs = zip(rows.stream_id.tolist(), rows.end_offset.tolist(), strict=True)
        for stream_id, end in pairs:
            # The trim sees the stream as it is after this commit.
            ends[stream_id] = max(end, ends.get(stream_id, 0))
    return ends


def _find_first_error(results: Sequence[KVResult], errors: Sequence[ErrorCode]) -> ErrorCode:
    every = (*(result.error for result in results), *errors)
    return next((error for error in every if error), ErrorCode.NONE)


def _rejection(request: Commit, error: ErrorCode) -> CommitAnswer:
    if isinstance(request, CommitStreamSetObject):
        return failed_commit(request, error)
    return CommitStreamObjectAnswer(error=error)
