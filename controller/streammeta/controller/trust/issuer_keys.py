"""Keys of the issuer of tokens: read from a file or fetched, and again as they change.

Blocking reads run in a thread. Those asked for because of an unknown key are shared by all that
wait, and rare: a flood of such tokens does not reach the issuer. Verifies no token.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

import structlog

from streammeta.controller.config import is_protected
from streammeta.controller.trust.tokens import IssuerKey, KeysError, parse_keys
from streammeta.storage.parsing import parse_json

ANSWER_BYTES_MAX = 1 << 20
"""Largest answer of an issuer that is read."""

TIMEOUT_S = 5.0
"""Time for each step of a request to the issuer, in seconds."""

FETCH_INTERVAL_S = 300.0
"""Time between two requests for the keys, in seconds: as long a removed key may still be taken."""

READ_AGAIN_S = 10.0
"""Least time between two reads for the sake of unknown keys, in seconds."""

_CHUNK_BYTES = 1 << 16
_DISCOVERY = "/.well-known/openid-configuration"

_log = structlog.get_logger(component="trust")


class KeysFile:
    """A file with a set of keys."""

    def __init__(self, path: Path, interval_s: float) -> None:
        self.name = str(path)
        self.interval_s = interval_s
        self._path = path

    def read(self) -> bytes:
        """Return the set as text. Blocks. Raises KeysError."""
        try:
            return self._path.read_bytes()
        except OSError as error:
            wanted = "must be a file with a JSON Web Key Set"
            raise KeysError(f"{self._path}: can't be read: {error.strerror}; {wanted}") from None


class KeysAddress:
    """Address of a set of keys. If empty, the issuer publishes the address."""

    interval_s = FETCH_INTERVAL_S

    def __init__(self, issuer: str, address: str = "") -> None:
        self.name = address or issuer
        self._issuer = issuer
        self._address = address

    def read(self) -> bytes:
        """Return the set as text. Blocks. Raises KeysError."""
        return _fetched(self._address or self._published())

    def _published(self) -> str:
        place = self._issuer.rstrip("/") + _DISCOVERY
        try:
            found = parse_json(_fetched(place))
            issuer, address = found["issuer"], found["jwks_uri"]
        except (ValueError, KeyError, TypeError):
            raise KeysError(f"{place}: must be a JSON object with issuer and jwks_uri") from None
        # A document of another issuer would let its keys sign for this one.
        if issuer != self._issuer:
            raise KeysError(f"{place}: names the issuer {issuer!r}, must name {self._issuer!r}")
        # Keys from an unprotected address could be replaced on the way.
        if not isinstance(address, str) or not is_protected(address):
            raise KeysError(f"{place}: jwks_uri: {address!r}, must begin with https://")
        return address


KeysSource = KeysFile | KeysAddress


class IssuerKeys:
    """Keys of an issuer as last read. `use` is called whenever they have changed."""

    def __init__(self, source: KeysSource, use: Callable[[Mapping[str, IssuerKey]], None]) -> None:
        self._source = source
        self._use = use
        self._text = b""
        self._problem = ""
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()

    def look_now(self) -> None:
        """Let `run` read at once."""
        self._asked.set()

    async def run(self) -> None:
        """Read time and again, until cancelled."""
        try:
            while True:
                # Cleared before the read, so that a request during it leads to another read.
                self._asked.clear()
                await self._read()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._source.interval_s):
                        await self._asked.wait()
        finally:
            if self._reading is not None:
                self._reading.cancel()

    async def read_again(self) -> None:
        """Read for the sake of an unknown key, unless that was done a moment ago."""
        # A read in flight may have begun before the key was published, but a second one would let a
        # flood of tokens reach the issuer.
        if self._reading is not None or time.monotonic() - self._read_at >= READ_AGAIN_S:
            await self._read()

    async def _read(self) -> None:
        """Read the keys, or wait for the read under way."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._take())
        # Others wait for the same read, so a cancelled caller must not cancel it.
        await asyncio.shield(self._reading)

    async def _take(self) -> None:
        # Before the read, so that failed ones are limited too.
        self._read_at = time.monotonic()
        try:
            text = await asyncio.to_thread(self._source.read)
            if text != self._text:
                self.take(text)
            self._problem = ""
        except KeysError as error:
            self._tell(str(error))
        except Exception as error:  # noqa: BLE001 - keys in use stay in use, and the controller up
            self._tell(f"defect: {error!r}")
        finally:
            self._reading = None

    def take(self, text: bytes) -> None:
        """Use the keys of a text. On KeysError the previous keys stay in use."""
        keys = parse_keys(text, self._source.name)
        self._text = text
        _log.info("token_keys_read", source=self._source.name, ids=sorted(keys))
        self._use(keys)

    def _tell(self, problem: str) -> None:
        # The source is read repeatedly, and one line for each problem is enough.
        if problem != self._problem:
            _log.error("token_keys_not_read", reason=problem)
        self._problem = problem


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nothing: the address given is the one that is trusted."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Refuse to go elsewhere."""


def _fetched(address: str) -> bytes:
    """Return the body at a URL that `is_protected`. Raises KeysError."""
    opener = urllib.request.build_opener(_NoRedirect)
    # The timeout of a socket restarts with every byte. This bounds the whole answer.
    ends_at = time.monotonic() + 2 * TIMEOUT_S
    body = b""
    try:
        with opener.open(address, timeout=TIMEOUT_S) as answer:
            while chunk := answer.read1(_CHUNK_BYTES):
                body += chunk
                if len(body) > ANSWER_BYTES_MAX:
                    raise KeysError(f"{address}: answers more than {ANSWER_BYTES_MAX} bytes")
                if time.monotonic() > ends_at:
                    raise KeysError(f"{address}: answers too slowly")
    except (OSError, HTTPException, ValueError) as error:
        raise KeysError(f"{address}: can't be fetched: {error}") from None
    return body
