"""IP addresses of the voters' hosts, from repeated name look-ups."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable

LOOK_INTERVAL_S = 30.0
"""Interval between two look-ups of the names, in seconds."""

_MAPPED = "::ffff:"

Resolve = Callable[[str], Awaitable[Iterable[str]]]


class VoterHosts:
    """IP addresses of the hosts in a set of HOST:PORT addresses, which may change."""

    def __init__(self, addresses: Callable[[], Iterable[str]], resolve: Resolve | None = None):
        self._addresses = addresses
        self._resolve = resolve or _resolve
        self._resolved: dict[str, frozenset[str]] = {}

    def __contains__(self, host: str) -> bool:
        """Return whether an IP address is a voter's, as far as names are resolved."""
        plain = host.removeprefix(_MAPPED)
        return any(plain in self._known(name) for name in self._names())

    async def run(self) -> None:
        """Resolve names repeatedly until cancelled. A failed look-up keeps the old addresses."""
        while True:
            for name in self._names():
                if not _is_ip(name):
                    with contextlib.suppress(OSError, UnicodeError):  # UnicodeError: invalid name
                        self._resolved[name] = frozenset(await self._resolve(name))
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _names(self) -> set[str]:
        return {address.rpartition(":")[0].strip("[]") for address in self._addresses()}

    def _known(self, name: str) -> frozenset[str]:
        return frozenset((name,)) if _is_ip(name) else self._resolved.get(name, frozenset())


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _resolve(name: str) -> Iterable[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}
