"""Decisions about idempotent producers: blocks of ids, and the end of unused states."""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import answers, requests
from streammeta.controller.metadata.registries.cluster_modes import FeatureLevel
from streammeta.controller.metadata.registries.nodes import Nodes
from streammeta.controller.metadata.registries.producers import Producers
from streammeta.controller.metadata.registries.stream_decisions import SHARED_LEVEL
from streammeta.controller.records import record as rec


@dataclass(frozen=True, eq=False)
class ProducerDecisions:
    """Decisions on IssueProducerIds and ExpireProducers, against the current state."""

    _nodes: Nodes
    _producers: Producers
    _level: FeatureLevel

    def issue(
        self, request: requests.IssueProducerIds
    ) -> tuple[rec.ProducerIdsIssued | None, answers.IssueProducerIdsAnswer]:
        """Issue the next ids.

        Raises:
            FeatureLevelError: the cluster is below `SHARED_LEVEL`.
        """
        error = self._nodes.check(request.node)
        if error is not ErrorCode.NONE:
            return None, answers.IssueProducerIdsAnswer(error=error)
        self._level.require(SHARED_LEVEL, "idempotent producers")
        first = self._producers.next_producer_id
        record = rec.ProducerIdsIssued(first_producer_id=first, count=request.count)
        return record, answers.IssueProducerIdsAnswer(error=error, first_producer_id=first)

    def expire(
        self, request: requests.ExpireProducers, now_ms: int
    ) -> tuple[rec.ProducersExpired | None, answers.ExpireProducersAnswer]:
        """Forget the producers that were not used for `idle_ms`, oldest first."""
        stream_id, producer_id = self._producers.list_expired(
            now_ms - request.idle_ms, request.limit, request.since_ms - request.idle_ms
        )
        answer = answers.ExpireProducersAnswer(expired=len(stream_id))
        if not len(stream_id):
            return None, answer
        return rec.ProducersExpired(stream_id=stream_id, producer_id=producer_id), answer
