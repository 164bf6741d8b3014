"""The audit log of one controller: its file, its thread, its lines of start and stop, its anchors.

Without `audit_log` in the configuration nothing is recorded, and calls cost nothing more. The
leader stores the ends of all controllers' chains in the metadata.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import structlog

from streammeta.controller.config import ConfigError, ControllerConfig
from streammeta.controller.errors import ApiError, NotLeaderError
from streammeta.controller.metadata.api.answers import KVResultsAnswer
from streammeta.controller.metadata.api.requests import GetKVs, KVKey, KVToPut, PutKVs
from streammeta.controller.monitoring.status.peer_status import Answer, PeerStatusClient
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.tls.manager import TlsManager
from streammeta.controller.trust.audit.auditor import Auditor, Clock, LeadershipState
from streammeta.controller.trust.audit.file import AuditFile, AuditLog, StandardOutput
from streammeta.controller.trust.audit.lines import NAMESPACE, Anchor, Chain, read_anchor
from streammeta.controller.trust.audit.writer import AuditWriter
from streammeta.storage.durable_files import PosixFileSystem

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


@dataclass(eq=False)
class AuditAnchors:
    """Writes anchors while this controller leads."""

    _controller: MetadataController
    _cluster_id: str
    _wall_ms: Callable[[], int]
    _heads: Heads
    """Returns the ends of chains by controller, as far as they are known."""

    def __post_init__(self) -> None:
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
