"""The audit log of one controller: its file, its thread, and its lines of start and stop.

Without `audit_log` in the configuration nothing is recorded, and calls cost nothing more.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from streammeta.controller.config import ConfigError, ControllerConfig
from streammeta.controller.monitoring.status.peer_status import PeerStatusClient
from streammeta.controller.process.audit_anchoring import AuditAnchors, read_heads
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.tls.manager import TlsManager
from streammeta.controller.trust.audit.auditor import Auditor, Clock, LeadershipState
from streammeta.controller.trust.audit.file import AuditFile, AuditLog, StandardOutput
from streammeta.controller.trust.audit.lines import Chain
from streammeta.controller.trust.audit.writer import AuditWriter
from streammeta.storage.durable_files import PosixFileSystem

STANDARD_OUTPUT = Path("-")

_WANTED = "give a file in a directory that this user may write, or - for standard output"


class Auditing:
    """A context in which calls are recorded."""

    def __init__(
        self,
        config: ControllerConfig,
        clock: Clock,
        driver: QuorumDriver,
        controller: MetadataController,
        tls: TlsManager,
    ) -> None:
        """Open the log.

        While this controller leads it anchors the ends of this log and of the others, which it
        requests as `tls` says.

        Raises:
            ConfigError: it can't be opened.
        """
        self.writer: AuditWriter | None = None
        """Writer of the log, None without a log."""
        self._tasks: list[asyncio.Task[None]] = []
        self._node_id, self._cluster_id = config.node_id, config.cluster_id
        self._driver = driver
        # A function, because certificates are replaced while the process runs.
        self._others = PeerStatusClient(lambda: tls.contents_for_calls)
        self._anchors = AuditAnchors(controller, config.cluster_id, clock.wall_ms, self._heads)
        self.auditor: Auditor | None = None
        """Recorder of calls, None without a log."""
        # Every process begins a chain of its own there.
        self._is_pipe = config.audit_log == STANDARD_OUTPUT
        if config.audit_log is not None:
            self.writer = AuditWriter(_opened(config.audit_log))
            self.auditor = Auditor(self.writer, clock, self._leadership, config.audit_failure)

    def look(self) -> None:
        """Continue in a file of the log's name: the one until now may have been renamed."""
        if self.writer is not None:
            self.writer.reopen()

    def changed(self, name: str, reason: str, target: Mapping[str, str]) -> None:
        """Record that files were replaced, or why not. May be called in any thread."""
        if self.auditor is not None:
            self.auditor.event(name, reason=reason, target=target)

    def head(self) -> Chain | None:
        """Return the durable end of the log, None without a log in a file."""
        return None if self.writer is None or self._is_pipe else self.writer.durable_head

    def _leadership(self) -> LeadershipState:
        leader, node_id = self._driver.leader, self._node_id
        leads = leader is not None and leader[0] == node_id
        return LeadershipState(node_id, self._driver.epoch, leads)

    async def _heads(self) -> Mapping[int, Chain]:
        """Return the ends of the controllers' logs, as far as they answer, while this one leads."""
        # Only the leader writes anchors, and asking everyone costs a call each.
        if not self._leadership().leads:
            return {}
        seen = self._driver.describe()
        endpoints: dict[int, str] = {
            replica.key.node_id: replica.endpoint
            for replica in (*seen.voters, *seen.observers)
            if replica.endpoint and replica.key.node_id != self._node_id
        }
        heads = read_heads(await self._others.ask(endpoints), self._cluster_id)
        own = self.head()
        return heads if own is None else {**heads, self._node_id: own}

    async def __aenter__(self) -> Auditing:
        if self.auditor is not None:
            self.auditor.begin()
            self._tasks = [
                asyncio.create_task(self.auditor.run()),
                asyncio.create_task(self._anchors.run()),
            ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        # Ended before the log is closed, because they write to it.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._others.close()
        if self.auditor is not None and self.writer is not None:
            # Before the writer stops, so that the line of the end is the last one written.
            self.auditor.end()
            await self.writer.stop()
            # After the stop, because only then is the head final.
            self.auditor.tell_head()


def check_audit_log(config: ControllerConfig) -> None:
    """Check that the audit log can be opened or created, without creating it.

    Raises:
        ConfigError: it could not.
    """
    if config.audit_log is None or config.audit_log == STANDARD_OUTPUT:
        return
    path = config.audit_log.absolute()
    if path.exists():
        problem = _lacking(path, os.R_OK | os.W_OK)
    else:
        # The start creates missing folders, so the nearest existing one decides.
        folder = next(folder for folder in path.parents if folder.exists())
        is_folder = folder.is_dir()
        problem = (
            _lacking(folder, os.W_OK | os.X_OK) if is_folder else f"{folder} is not a directory"
        )
    if problem:
        raise ConfigError(f"audit-log: {path} can't be opened: {problem}; {_WANTED}")


def _lacking(path: Path, mode: int) -> str:
    return "" if os.access(path, mode) else f"this user may not write {path}"


def _opened(path: Path) -> AuditLog:
    if path == STANDARD_OUTPUT:
        return StandardOutput()
    try:
        return AuditFile(PosixFileSystem(), path.absolute())
    except OSError as error:
        raise ConfigError(f"audit-log: {path} can't be opened: {error}; {_WANTED}") from error
