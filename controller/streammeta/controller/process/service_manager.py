"""Word of a controller's life to the service manager that started it.

Speaks systemd's protocol, sd_notify(3): datagrams of NAME=VALUE lines to the socket that the
environment names. Without one nothing is sent. Knows nothing of what a controller does.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

import structlog

_log = structlog.get_logger(component="server")

START_BEAT_S = 5.0
"""Interval at which a long start requests more time, in seconds."""

START_EXTENSION_S = 60.0
"""Time asked for, in seconds: the event loop may be busy with a large map for some of them."""


class ServiceManager:
    """The service manager named by NOTIFY_SOCKET, if there is one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._watchdog_s = _watchdog_s(environment)
        self._is_starting = True

    async def run(self) -> None:
        """Request more time during a long start, then report that the event loop runs."""
        while self._address and self._is_starting:
            self._tell(f"EXTEND_TIMEOUT_USEC={START_EXTENSION_S * 1e6:.0f}")
            await asyncio.sleep(START_BEAT_S)
        while self._address and self._watchdog_s is not None:
            self._tell("WATCHDOG=1")
            # sd_notify(3) recommends half of the interval.
            await asyncio.sleep(self._watchdog_s / 2)

    def ready(self, status: str) -> None:
        """Report that the start is complete. `status` is text for people."""
        self._is_starting = False
        self._tell(f"READY=1\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        """Say that the end has begun."""
        self._tell(f"STOPPING=1\nSTATUS={status}")

    def _tell(self, lines: str) -> None:
        if not self._address:
            return
        # A name in Linux' abstract namespace begins with a zero byte, written as @.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                # A service manager that does not read must not block the event loop.
                channel.setblocking(False)
                channel.sendto(lines.encode(), address)
        # A controller runs without its service manager too.
        except OSError as error:
            _log.warning("service_manager_not_told", lines=lines, error=str(error))


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Return the time that the service manager waits for a word, None if it does not watch us."""
    told = environment.get("WATCHDOG_USEC", "")
    # The variables are inherited, and a child of the watched process is not watched.
    process = environment.get("WATCHDOG_PID") or str(os.getpid())
    if not told.isdecimal() or int(told) == 0 or process != str(os.getpid()):
        return None
    return int(told) / 1e6
