"""Status and history of a controller as JSON over HTTP. The pages use the same documents."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping

from streammeta.controller.ids import NodeId
from streammeta.controller.monitoring.history.history import LENGTHS, Window
from streammeta.controller.monitoring.history.sampling import SERIES, Sampler
from streammeta.controller.monitoring.http.http_listener import Page, ResponseCache
from streammeta.controller.monitoring.metrics.metrics import Sources
from streammeta.controller.monitoring.parts import Parts
from streammeta.controller.monitoring.status.largest import TopSizes, TopStreams
from streammeta.controller.monitoring.status.peer_status import PeerStatusClient
from streammeta.controller.monitoring.status.status import Fields, Knowledge, status

JSON = "application/json"

UNITS = {series.name: series.unit for series in SERIES}


class StatusApi:
    """Builder of the documents."""

    def __init__(self, sources: Sources, parts: Parts, sampler: Sampler) -> None:
        self._sources = sources
        self._parts = parts
        self._sampler = sampler
        self._others = PeerStatusClient(lambda: parts.tls.contents_for_calls)
        self._top_streams = TopStreams(lambda: parts.cluster_metadata().ranges_of_streams())
        self._top_sizes = TopSizes(lambda rows: parts.cluster_metadata().owned_sizes(rows))
        self._kept: ResponseCache[Fields] = ResponseCache()

    async def close(self) -> None:
        """Close the connections to other controllers and stop all scans of the metadata."""
        self._top_sizes.close()
        await self._others.close()

    async def document(self) -> Fields:
        """Return the status, at most a second old."""
        return await self._kept.get("status", self._document)

    async def status(self, _: Mapping[str, str]) -> Page:
        """Answer a request for the status."""
        return json_page(await self.document())

    async def series(self, query: Mapping[str, str]) -> Page:
        """Answer a request for samples later than `since`, `step` seconds apart.

        `names` are series separated by commas, all by default.
        """
        try:
            since_s = float(query.get("since", "0"))
            # A dictionary and no int(): only these steps have a ring of samples.
            step_s = {str(length): length for length in LENGTHS}[query.get("step", "1")]
            names = query["names"].split(",") if query.get("names") else list(UNITS)
            if unknown := [name for name in names if name not in UNITS]:
                raise ValueError(f"names: {unknown[0]!r}, must be among {', '.join(UNITS)}")
        except KeyError:
            return json_page({"error": "step: must be 1, 10 or 60"}, 400)
        except ValueError as error:
            return json_page({"error": str(error)}, 400)
        window = self._sampler.history.since(since_s, names, step_s)
        return json_page({"at_s": time.time(), "units": UNITS, **_columns(window)})

    async def _document(self) -> Fields:
        seen = self._sources.quorum()
        others: dict[int, str] = {
            replica.key.node_id: replica.endpoint
            for replica in (*seen.voters, *seen.observers)
            if replica.key.node_id != seen.node_id
        }
        answers = await self._others.ask(others)
        software = {node_id: self._parts.peers.versions.of(NodeId(node_id)) for node_id in others}
        known = Knowledge(
            parts=self._parts,
            sources=self._sources,
            sampler=self._sampler,
            nodes=self._parts.cluster_metadata().nodes(),
            versions={
                key: release.version for key, release in software.items() if release is not None
            },
            top_streams=await self._top_streams.known(),
            top_sizes=await self._top_sizes.known(),
        )

        return status(known, answers, time.time())


def _columns(window: Window) -> Fields:
    """Return a window as lists, with None for an unknown value."""
    columns = {
        # Three decimals are enough for a chart, and keep a day of samples small.
        name: [None if math.isnan(value) else round(value, 3) for value in values.tolist()]
        for name, values in window.columns.items()
    }
    return {"times": window.times.tolist(), "series": columns}


def json_page(document: Fields, code: int = 200) -> Page:
    """Return an answer with a document as JSON."""
    # JSON has no NaN, and browsers would reject the whole document.
    return Page(json.dumps(document, allow_nan=False).encode() + b"\n", code, JSON)
