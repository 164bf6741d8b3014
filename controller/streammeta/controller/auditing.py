"""The audit log of one controller: its file, its thread, and its lines of start and stop.

Without `audit_log` in the configuration nothing is recorded, and calls cost nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from streammeta.controller.config import ConfigError, ControllerConfig
from streammeta.controller.trust.audit_file import AuditFile, AuditLog, StandardOutput
from streammeta.controller.trust.audit_writer import AuditWriter
from streammeta.controller.trust.auditor import Auditor, Clock, Office
from streammeta.storage.durable_files import PosixFileSystem

STANDARD_OUTPUT = Path("-")

_WANTED = "give a file in a directory that this user may write, or - for standard output"


class Auditing:
    """A context in which calls are recorded."""

    def __init__(
        self, config: ControllerConfig, clock: Clock, office: Callable[[], Office]
    ) -> None:
        """Open the log.

        Raises:
            ConfigError: it can't be opened.
        """
        self.writer: AuditWriter | None = None
        """Writes the log; None without one."""
        self._minutes: asyncio.Task[None] | None = None
        self.auditor: Auditor | None = None
        """Records calls; None without a log."""
        if config.audit_log is not None:
            self.writer = AuditWriter(_opened(config.audit_log))
            self.auditor = Auditor(self.writer, clock, office, config.audit_failure)

    def look(self) -> None:
        """Go on in a file of the log's name: the one until now may have been renamed."""
        if self.writer is not None:
            self.writer.reopen()

    def changed(self, name: str, reason: str, target: Mapping[str, str]) -> None:
        """Record that files were replaced, or why not. May be called in any thread."""
        if self.auditor is not None:
            self.auditor.event(name, reason=reason, target=target)

    async def __aenter__(self) -> Auditing:
        if self.auditor is not None:
            self.auditor.begin()
            self._minutes = asyncio.create_task(self.auditor.run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._minutes is not None:
            self._minutes.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._minutes
        if self.auditor is not None and self.writer is not None:
            self.auditor.end()
            await self.writer.stop()
            self.auditor.tell_head()


def check_audit_log(config: ControllerConfig) -> None:
    """Check that the audit log could be opened, or made; make nothing.

    Raises:
        ConfigError: it could not.
    """
    if config.audit_log is None or config.audit_log == STANDARD_OUTPUT:
        return
    path = config.audit_log.absolute()
    if path.exists():
        problem = _lacking(path, os.R_OK | os.W_OK)
    else:
        folder = next(folder for folder in path.parents if folder.exists())
        is_folder = folder.is_dir()
        problem = _lacking(folder, os.W_OK | os.X_OK) if is_folder else f"{folder} is no directory"
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
