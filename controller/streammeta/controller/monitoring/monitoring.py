"""Monitoring of one controller: its HTTP pages, and its continuous measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from shutil import disk_usage

from streammeta.controller.grpc_server.server import open_connections
from streammeta.controller.monitoring.history.sampling import LoopLag, Sampler
from streammeta.controller.monitoring.http.http_listener import HttpPlane, Page, Route
from streammeta.controller.monitoring.http.probes import Condition, report, unready
from streammeta.controller.monitoring.metrics import families, metrics
from streammeta.controller.monitoring.metrics.work_metrics import Leaderships
from streammeta.controller.monitoring.pages.pages import StatusPages
from streammeta.controller.monitoring.parts import Parts
from streammeta.controller.monitoring.status.status_api import StatusApi
from streammeta.controller.rpc.calls import error_mapping
from streammeta.controller.runtime.clock import SystemClock
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.storage.cluster_files.reconcile_runs import KEY, NAMESPACE
from streammeta.storage.installation import DISTRIBUTION


class Monitoring:
    """Probes, metrics and pages of a controller, with the authenticator's access rules."""

    def __init__(self, parts: Parts, authenticator: Authenticator) -> None:
        self._parts = parts
        pages = {
            "/livez": Route("livez", self._livez),
            "/readyz": Route("readyz", self._readyz),
            "/metrics": Route("metrics", self._metrics),
        }
        # The dict is completed below. The listener reads it only after start.
        self._plane = HttpPlane(parts.tls.http, authenticator, pages)
        sources = self._sources()
        registry = families.new_registry(metrics.ControllerCollector(sources))
        self._loop_lag = LoopLag(registry)
        self._exposition = families.Exposition(registry)
        self._measuring: list[asyncio.Task[None]] = []
        self._status: StatusApi | None = None

        if parts.shows_status:
            self._sampler = Sampler(
                sources,
                loop_lag=self._loop_lag.take_worst_s,
                memory=lambda: parts.memory.rss_bytes,
            )
            self._status = StatusApi(sources, parts, self._sampler)
            pages["/api/status.json"] = Route("status", self._status.status)
            pages["/api/series.json"] = Route("status", self._status.series)
            pages.update(StatusPages(self._status, parts.controller, parts.view).routes())

    async def start(self, address: str) -> int:
        """Serve at HOST:PORT and return the port, chosen by the system if it is 0.

        Raises:
            OSError: the address is in use, or does not belong to this host.
        """
        # First, because a failure to listen must not leave a task running.
        port = await self._plane.start(address)
        self._measuring.append(asyncio.create_task(self._loop_lag.run()))
        if self._status is not None:
            self._measuring.append(asyncio.create_task(self._sampler.run()))
        return port

    async def stop(self) -> None:
        """Stop listening after the pending answers are sent."""
        # Before the listener stops, so that no sample reads a part that is being closed.
        for task in self._measuring:
            task.cancel()
        await self._plane.stop()
        if self._status is not None:
            await self._status.close()

    async def _livez(self, _: Mapping[str, str]) -> Page:
        # That the event loop answers is the whole proof. More would restart healthy processes.
        return Page(b"ok\n")

    async def _readyz(self, _: Mapping[str, str]) -> Page:
        condition = Condition(
            phase=self._parts.phase(),
            quorum=self._parts.driver.describe(),
            applied=self._parts.controller.committed_end,
        )
        is_ready, text = report(unready(condition))
        return Page(text.encode(), 200 if is_ready else 503)

    async def _metrics(self, _: Mapping[str, str]) -> Page:
        return Page(await self._exposition.text(), content_type=families.CONTENT_TYPE)

    def _sources(self) -> metrics.Sources:
        parts, leaderships = self._parts, Leaderships()
        # Registered once, here, so that terms are counted also without a scrape.
        parts.controller.on_leadership(leaderships.changed)

        return metrics.Sources(
            version=metadata.version(DISTRIBUTION),
            quorum=parts.driver.describe,
            applied=lambda: parts.controller.committed_end,
            metadata_size=lambda: parts.cluster_metadata().size(),
            certificates=parts.tls.states,
            connections=self._connections,
            refused_connections={"peers": parts.peers.refused, "http": self._plane.refused},
            handshakes=lambda: parts.tls.handshakes,
            refused_calls=error_mapping.refused,
            commits=parts.controller.commits,
            request_bytes=lambda: parts.request_memory.total,
            request_bytes_max=parts.request_memory.limit,
            memory_limit=parts.memory.limit_bytes,
            audit=parts.audit,
            backup=lambda: None if parts.backup is None else parts.backup.status,
            deletion=parts.deletion.describe,
            feature_level=lambda: parts.cluster_metadata().feature_level,
            lease_left_ms=lambda: parts.controller.lease.left_ms,
            reconcile_runs=lambda: metrics.read_told(
                parts.cluster_metadata().kv_value(NAMESPACE, KEY)
            ),
            requests=parts.requests,
            admission=parts.controller.gate.admission,
            leaderships=leaderships,
            peer_failures=parts.transport.failed,
            flushes=parts.journal.flush_times,
            appended_bytes=lambda: parts.journal.appended_bytes,
            log_bytes=lambda: parts.journal.size,
            # Called at a scrape, because the value changes with other users of the disk.
            free_bytes=lambda: disk_usage(parts.data_dir).free,
            checkpoints=parts.driver.checkpointer.tally,
            now_ms=SystemClock().monotonic_ms,
            metadata_used=lambda: parts.cluster_metadata().used(),
            metadata_limits=asdict(parts.metadata_limits),
            bucket=parts.store.metrics,
            sessions=parts.sessions.counts,
            fenced=lambda: parts.sessions.fenced,
            recoveries=lambda: parts.heartbeats.assigned_recoveries,
            compactions=lambda: parts.heartbeats.assigned_compactions,
        )

    def _connections(self) -> Mapping[str, int]:
        return {
            # The count belongs to the process: all listeners for clients share it.
            "clients": open_connections(),
            "peers": self._parts.peers.connections,
            "http": self._plane.connections,
        }
