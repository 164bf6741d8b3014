"""Anchoring of audit logs: the leader stores the ends of controllers' chains in the metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from streammeta.controller.errors import ApiError, NotLeaderError
from streammeta.controller.metadata.api.answers import KVResultsAnswer
from streammeta.controller.metadata.api.requests import GetKVs, KVKey, KVToPut, PutKVs
from streammeta.controller.monitoring.status.peer_status import Answer
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.trust.audit.anchors import NAMESPACE, Anchor, read_anchor
from streammeta.controller.trust.audit.lines import Chain

ANCHOR_INTERVAL_S = 10.0
"""Time between two anchors, in seconds: lines of the last such time may be cut unnoticed."""

Heads = Callable[[], Awaitable[Mapping[int, Chain]]]

_log = structlog.get_logger(component="audit")


def read_heads(answers: Mapping[int, Answer], cluster_id: str) -> dict[int, Chain]:
    """Return the ends of chains in the answers of controllers, given by the id that was asked.

    An address can lead to another controller than the log says, for as long as it is out of date.
    An anchor is permanent, so no answer counts for a controller that did not send it.
    """
    return {
        node_id: Chain(view.audit_seq, view.audit_hash)
        for node_id, answer in answers.items()
        if (view := answer.view) is not None
        and view.audit_seq
        and (view.cluster_id, view.node_id) == (cluster_id, node_id)
    }


class AuditAnchors:
    """Writes anchors while this controller leads."""

    def __init__(
        self,
        controller: MetadataController,
        cluster_id: str,
        wall_ms: Callable[[], int],
        heads: Heads,
    ) -> None:
        """`heads` returns the ends of chains by controller, as far as they are known."""
        self._controller = controller
        self._cluster_id = cluster_id
        self._wall_ms = wall_ms
        self._heads = heads
        self._problem = ""

    async def run(self) -> None:
        """Write anchors time and again, until cancelled."""
        while True:
            await asyncio.sleep(ANCHOR_INTERVAL_S)
            await self.anchor()

    async def anchor(self) -> None:
        """Anchor the chains that have grown, if this controller leads."""
        try:
            await self._put(await self._heads())
            self._problem = ""
        # Leadership ended meanwhile. The next leader writes the anchors.
        except NotLeaderError:
            return
        except Exception as error:  # noqa: BLE001 - nobody waits for this task, or sees it end
            reason = str(error) if isinstance(error, ApiError) else repr(error)
            if reason != self._problem:
                _log.warning("audit_head_not_anchored", reason=reason)
            self._problem = reason

    async def _put(self, heads: Mapping[int, Chain]) -> None:
        keys = tuple(KVKey(namespace=NAMESPACE, key=str(node)) for node in heads)
        if not keys:
            return

        # Read first: an unchanged chain causes no entry in the log.
        answered = await self._controller.read(GetKVs(keys=keys))
        assert isinstance(answered.answer, KVResultsAnswer)
        items = []
        for key, chain, result in zip(keys, heads.values(), answered.answer.results, strict=True):
            known = read_anchor(result.value) if result.found else None
            if chain.seq and (known is None or known.is_passed_by(chain, self._cluster_id)):
                anchor = Anchor(self._cluster_id, chain.seq, chain.head, self._wall_ms())
                items.append(
                    KVToPut(
                        namespace=NAMESPACE,
                        key=key.key,
                        value=anchor.encoded(),
                        overwrite=True,
                        # A key that changed since the read has a newer anchor, which must stay.
                        expected_version=result.version,
                    )
                )

        if items:
            await self._controller.write(PutKVs(items=tuple(items)))
