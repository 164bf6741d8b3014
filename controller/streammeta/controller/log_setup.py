"""Logging setup: JSON lines on standard error, or readable lines on a terminal.

Events are past-tense snake_case facts, and everything else about them is a key. A line that cannot
be written is dropped: logging must never stop the work it reports.
"""

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog


def configure_logging(level: str = "info", *, as_json: bool | None = None) -> None:
    """Send structlog's events to standard error.

    `level` is one of debug, info, warning, error. `as_json` None means JSON unless standard error
    is a terminal.
    """
    if as_json is None:
        as_json = not sys.stderr.isatty()

    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Dropping(sys.stderr))),
        cache_logger_on_first_use=True,
    )


class _Dropping:
    """A text file that drops lines it cannot write, as on a full disk or a closed pipe."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write `text` if possible and return its length."""
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush buffered text if possible."""
        with contextlib.suppress(OSError):
            self._file.flush()
