"""The process and its operating system: service manager, signals, descriptors, replaced files.

`ServiceManager` speaks systemd's protocol, sd_notify(3): datagrams of NAME=VALUE lines to the
socket that the environment names. Without one nothing is sent.

SIGINT and SIGTERM count alike, from the start on: a process that is the first of its container is
not ended by them otherwise. The first signal asks for the end, the second hurries it, the third
kills. Signals are handled while a long call keeps the event loop as well.

A process without free descriptors can neither open a log file nor connect to a peer, so client
connections are limited. `Reloading` knows neither the files nor the meaning of their changes. The
first lines of the log have the version, the settings without secrets, and a warning of open files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from types import FrameType

import structlog

from streammeta.controller.config import ControllerConfig
from streammeta.storage.durable_files import advise_private
from streammeta.storage.installation import DISTRIBUTION
from streammeta.storage.object_store.protocol.address import without_secrets

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


NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Signals of this process so far: none, a stop, an immediate stop."""

    def __init__(self) -> None:
        """Install the handlers. Must be called on the event loop of the main thread."""
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        """Set at the second signal: the stop waits for no client and no other replica."""
        self.on_asked: Callable[[], None] = _do_nothing
        """Called on the event loop at the first signal."""
        self._came = 0
        self._loop = asyncio.get_running_loop()
        for number in NUMBERS:
            # Not the event loop's handlers: they would run only after a long call has ended.
            signal.signal(number, self._on_signal)

    @property
    def are_there(self) -> bool:
        """Whether a signal has come, though the event loop had no turn since."""
        return self._came > 0

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._came += 1
        # From the third signal on the kernel ends the process, even if the event loop hangs.
        if self._came == 2:
            for number in NUMBERS:
                signal.signal(number, signal.SIG_DFL)
        # The plain call_soon would not wake a loop that sleeps.
        self._loop.call_soon_threadsafe(self._tell, self._came, signal.Signals(number).name)

    def _tell(self, count: int, name: str) -> None:
        if count == 1:
            _log.info("controller_stopping", signal=name)
            self.on_asked()
            self.asked.set()
        else:
            _log.info("controller_stop_hurried", signal=name)
            self.hurried.set()


def _do_nothing() -> None:
    """Do nothing: nothing has started yet."""


class Reloading:
    """Calls every one of `looks` in a thread, once in `interval_ms` and whenever it is asked."""

    def __init__(self, interval_ms: int, looks: Sequence[Callable[[], None]]) -> None:
        self._interval_s = interval_ms / 1000
        self._looks = looks
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Look now."""
        self._asked.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._asked.wait()
            self._asked.clear()
            # Each on its own, so that one broken file does not hide the changes of others.
            for look in self._looks:
                try:
                    await asyncio.to_thread(look)
                except Exception as error:  # noqa: BLE001 - the files in use stay in use
                    _log.error("files_not_looked_at", exc_info=error)


DESCRIPTORS_KEPT = 256
"""Descriptors reserved for the journal, snapshots, the bucket and the peers."""

DESCRIPTORS_FOR_HTTP = 128
"""Additional descriptors reserved for the HTTP listener's connections and handshakes."""

CONNECTIONS_MIN = 16
"""Connections that are always allowed, even with very few descriptors."""

_ENOUGH = 1 << 20


def raise_limit() -> int:
    """Raise this process's descriptor limit as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    # A higher soft limit than needed is left as the operator set it.
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _ENOUGH if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connections_within(limit: int, most: int, listeners: int, *, serves_http: bool = False) -> int:
    """Return how many connections each of `listeners` for clients may have.

    This is `most` if that leaves the reserved descriptors free, including those for HTTP if served.
    """
    kept = DESCRIPTORS_KEPT + DESCRIPTORS_FOR_HTTP if serves_http else DESCRIPTORS_KEPT
    # Divided by the listeners, because each enforces its own limit.
    return max(CONNECTIONS_MIN, min(most, limit - kept) // max(1, listeners))


def log_start(config: ControllerConfig) -> None:
    """Log version and settings, the store's address without its secrets, and open files."""
    settings = asdict(config)
    # Logged as fields of their own, below.
    del settings["node_id"], settings["cluster_id"]
    # Logs are shipped to systems with other readers than the secrets.
    settings["store_uri"] = without_secrets(config.store_uri)
    settings["backup_store"] = config.backup_store and without_secrets(config.backup_store)
    # Paths have no form in JSON.
    settings["data_dir"] = str(config.data_dir)
    settings["audit_log"] = config.audit_log and str(config.audit_log)
    settings["policy"] = config.policy and str(config.policy)
    for name in ("tls", "peer_tls", "http_tls"):
        if settings[name] is not None:
            settings[name] = {part: str(path) for part, path in settings[name].items()}

    _log.info(
        "controller_starting",
        version=metadata.version(DISTRIBUTION),
        pid=os.getpid(),
        node_id=config.node_id,
        cluster_id=config.cluster_id,
        settings=settings,
    )
    if config.backup_store and config.backup_keep_ms > config.delete_delay_ms:
        _log.warning(
            "backup_outlives_objects",
            backup_keep_ms=config.backup_keep_ms,
            delete_delay_ms=config.delete_delay_ms,
            advice="a restore to a point before --delete-delay-ms loses records that were trimmed "
            "or deleted since. Raise --delete-delay-ms to keep their objects longer",
        )

    _warn_of_open_files(config)


def _warn_of_open_files(config: ControllerConfig) -> None:
    """Log which of the controller's data other users of this machine can read."""
    for path in (config.data_dir, config.audit_log):
        if path is not None and (cure := advise_private(path)) is not None:
            _log.warning("data_open_to_others", path=str(path), cure=cure)
