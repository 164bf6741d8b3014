"""Channels to controllers: one for each endpoint, and new ones when certificates are replaced.

A channel keeps the certificate it was created with. So the files are checked from time to time when
a channel is requested. If they changed, later calls get new channels, and the old ones are closed
after a grace period.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence
from zlib import crc32

import grpc

from streammeta.client.resources.daemon_threads import run_blocking
from streammeta.client.resources.fork_check import note_connection
from streammeta.rpc.connections import client_channel
from streammeta.tls.files import TlsError, TlsFiles, WatchedTls

LOOKED_AT_EVERY_S = 5.0
"""Minimum time between two checks of the files, in seconds."""

_log = logging.getLogger(__name__)


class Channels:
    """Open channels, in plain text without `tls`. `grace_s` is the time left to replaced ones."""

    def __init__(self, tls: TlsFiles | None, grace_s: float) -> None:
        """Read the files.

        Raises:
            TlsError: a file is missing or invalid.
        """
        self._watched = None if tls is None else WatchedTls(tls)
        self._grace_s = grace_s
        self._looks_at = float("-inf")
        self._open: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._old: set[grpc.aio.Channel] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def endpoints(self) -> set[str]:
        """The endpoints with an open channel."""
        return set(self._open)

    @property
    def are_encrypted(self) -> bool:
        """Return whether the channels speak TLS."""
        return self._watched is not None

    def get(self, endpoint: str) -> grpc.aio.Channel:
        """Return the channel to an endpoint, which is created on the first call."""
        if self._watched is not None:
            self._check_certificates(self._watched)
        channel = self._open.get(endpoint)
        if channel is None:
            note_connection()
            tls = None if self._watched is None else self._watched.contents
            # Connects on first use, so an endpoint that is down costs nothing here.
            channel = self._open[endpoint] = client_channel(endpoint, tls)
        return channel

    async def close(self) -> None:
        """Close all channels. Calls in flight fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        channels = [*self._open.values(), *self._old]
        self._open.clear()
        self._old.clear()
        await asyncio.gather(*(channel.close() for channel in channels))

    def _check_certificates(self, watched: WatchedTls) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._looks_at:
            return
        # The constructor has just read the files.
        is_first = self._looks_at == float("-inf")
        self._looks_at = loop.time() + LOOKED_AT_EVERY_S
        if not is_first:
            task = loop.create_task(self._reload_certificates(watched))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reload_certificates(self, watched: WatchedTls) -> None:
        try:
            if not await run_blocking(watched.look):
                return
        except TlsError as error:
            _log.warning("new certificates are invalid, keeping the old ones: %s", error)
            return
        await self._renew()

    async def _renew(self) -> None:
        """Use new channels for later calls, and close the old ones after the grace period."""
        old = list(self._open.values())
        self._open.clear()
        self._old.update(old)
        # Calls in flight keep their channel until they end or time out.
        await asyncio.sleep(self._grace_s)
        for channel in old:
            self._old.discard(channel)
            await channel.close()


# Order in which a client asks the controllers for watches and reads at an offset.
#
# Any controller answers these from its committed state, and the leader is busy with writes. Each
# client has a random order, so that many clients spread evenly while each stays with one
# controller. The leader comes last. Does no I/O and reads no clock.


class ControllerSpread:
    """Configured and learned controllers, in one client's order."""

    def __init__(self, endpoints: Sequence[str], rng: random.Random) -> None:
        self._given = tuple(endpoints)
        self._learned: tuple[str, ...] = ()
        self._leader = ""
        self._failed: set[str] = set()
        # The same for the client's lifetime, so its order is stable.
        self._salt = f"{rng.getrandbits(64):x}"

    def learn(self, endpoints: Iterable[str], leader: str) -> None:
        """Apply a controller's list of all endpoints and of the leader. Empty ones are unknown.

        Earlier failures are forgotten.
        """
        self._learned = tuple(endpoint for endpoint in endpoints if endpoint)
        self._leader = leader
        self._failed.clear()

    def prefer_others(self, endpoint: str) -> None:
        """Prefer other controllers until `learn` or `clear_failure`."""
        self._failed.add(endpoint)

    def clear_failure(self, endpoint: str) -> None:
        """Record that a controller serves."""
        self._failed.discard(endpoint)

    def order(self, leader: str | None) -> list[str]:
        """Return all controllers, the best first. `leader` is the presumed leader, if any."""
        leads = self._leads(leader)

        def rank(endpoint: str) -> tuple[bool, bool, int]:
            own = crc32(f"{self._salt}{endpoint}".encode())
            return endpoint in leads, endpoint in self._failed, own

        return sorted({*self._given, *self._learned}, key=rank)

    def leads(self, endpoint: str, leader: str | None) -> bool:
        """Return whether `endpoint` belongs to the leader."""
        return endpoint in self._leads(leader)

    def has_better(self, endpoint: str, leader: str | None) -> bool:
        """Return whether `endpoint` leads, and a follower without a failure exists."""
        leads = self._leads(leader)
        if endpoint not in leads:
            return False
        return any(other not in leads | self._failed for other in {*self._given, *self._learned})

    def _leads(self, leader: str | None) -> set[str]:
        """Return the leader's endpoint, or two if it may also have another name here."""
        if leader is not None and leader in self._learned:
            return {leader}
        return {leader or "", self._leader} - {""}
