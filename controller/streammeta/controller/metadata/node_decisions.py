"""Decisions about nodes that depend on their streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import answers, requests
from streammeta.controller.metadata.reads import Reads
from streammeta.controller.metadata.registries.nodes import Nodes
from streammeta.controller.metadata.registries.streams import Streams
from streammeta.controller.records import record as rec
from streammeta.controller.records.record import Record


@dataclass(frozen=True, eq=False)
class NodeDecisions:
    """Decisions on GetOpeningStreams and UnregisterNode, against the current state."""

    _nodes: Nodes
    _streams: Streams
    _reads: Reads

    def open_streams(
        self, request: requests.GetOpeningStreams
    ) -> tuple[Sequence[Record], answers.GetOpeningStreamsAnswer]:
        """Register the node's epoch with the first page, and list the streams to recover."""
        record: rec.NodeEpochSet | None = None
        error = ErrorCode.NONE
        # Later pages and recoverers must not move the epoch: they only read.
        if request.page.page_token or request.recoverer is not None:
            error = self._nodes.check(
                request.node, fence_failover=False, recoverer=request.recoverer
            )
        if error is ErrorCode.NONE and not request.page.page_token:
            record, error = self._nodes.decide_epoch(request.node, failover=request.failover)
        if error is not ErrorCode.NONE:
            return (), answers.GetOpeningStreamsAnswer(error=error)

        answer = self._reads.opening_streams(request.node.node_id, request.page)
        changes = record is not None and answer.error is ErrorCode.NONE
        return (record,) if record is not None and changes else (), answer

    def unregister(
        self, request: requests.UnregisterNode
    ) -> tuple[rec.NodeUnregistered | None, answers.ErrorAnswer]:
        """Forget a node that owns nothing."""
        node_id = request.node.node_id
        # An open stream may have data that is not uploaded yet.
        owes = self._streams.open_count(node_id) > 0
        owes = owes or len(self._streams.active_uploads(node_id)) > 0
        return self._nodes.decide_unregister(request.node, owes_streams=owes)
