"""A controller that is killed when a LockNode is committed, before its outcome is recorded."""

import os
import signal

from streammeta.cli.main import main
from streammeta.controller.trust.audit.lines import AuditLine, Verdict
from streammeta.controller.trust.audit.writer import AuditWriter

_written = AuditWriter.written


async def written(writer: AuditWriter, line: AuditLine) -> None:
    """Record a line, unless it is the one."""
    if line.call == "NodeService.LockNode" and line.verdict is Verdict.OK:
        os.kill(os.getpid(), signal.SIGKILL)
    await _written(writer, line)


AuditWriter.written = written  # type: ignore[method-assign, assignment]

if __name__ == "__main__":
    main()
