"""Users of a broker: a file of scrypt hashes, and the verification of passwords.

Owns the file's format, one `NAME:scrypt$N$R$P$SALT$HASH` per line with salt and hash in base64, and
its reload after a change. Passwords are compared in constant time, and an unknown user costs as
much time as a known one. Neither passwords nor hashes appear in logs or errors.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NAME_MAX = 255
PASSWORD_MAX = 1024
"""Longest name and password, in bytes of UTF-8."""
FILE_MAX = 4 * 1024 * 1024
CHECKS_AT_ONCE = 2
"""Passwords hashed concurrently. Each needs 16 MiB and tens of milliseconds of a core."""

# Interactive parameters of RFC 7914. The upper bounds limit the work that a file can cause.
_ROUNDS, _BLOCKS, _LANES = 1 << 14, 8, 1
_ROUNDS_MAX, _BLOCKS_MAX, _LANES_MAX = 1 << 17, 16, 8
_SALT_BYTES, _HASH_BYTES = 16, 32
_ENCODED = re.compile(r"scrypt\$([0-9]{1,9})\$([0-9]{1,4})\$([0-9]{1,4})\$([^$]+)\$([^$]+)")

_log = logging.getLogger(__name__)


class UsersFileError(Exception):
    """A file of users is unreadable or has an invalid line. The message names both."""


@dataclass(frozen=True, slots=True, repr=False)
class PasswordHash:
    """Scrypt hash of a password with its costs and its salt."""

    rounds: int
    blocks: int
    lanes: int
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, password: bytes) -> PasswordHash:
        """Return the hash of a password with a random salt."""
        unhashed = cls(_ROUNDS, _BLOCKS, _LANES, secrets.token_bytes(_SALT_BYTES), b"")
        return cls(
            unhashed.rounds, unhashed.blocks, unhashed.lanes, unhashed.salt, unhashed.hash(password)
        )

    @classmethod
    def decode(cls, text: str) -> PasswordHash:
        """Parse the output of `encode`. Raises `ValueError`, which does not quote the text."""
        parts = _ENCODED.fullmatch(text)
        if parts is None:
            raise ValueError("not a scrypt hash")
        rounds, blocks, lanes = map(int, parts.groups()[:3])
        # scrypt requires a power of two.
        if rounds & (rounds - 1) or not (
            2 <= rounds <= _ROUNDS_MAX and 1 <= blocks <= _BLOCKS_MAX and 1 <= lanes <= _LANES_MAX
        ):
            raise ValueError("costs are out of bounds")
        found = cls(rounds, blocks, lanes, _unbase64(parts[4]), _unbase64(parts[5]))
        if len(found.salt) < _SALT_BYTES or len(found.digest) != _HASH_BYTES:
            raise ValueError("salt or hash has a wrong length")
        return found

    def encode(self) -> str:
        """Return the text form used in the file."""
        salt, digest = (base64.b64encode(part).decode() for part in (self.salt, self.digest))
        return f"scrypt${self.rounds}${self.blocks}${self.lanes}${salt}${digest}"

    def hash(self, password: bytes) -> bytes:
        """Return the hash of another password with the same salt and costs."""
        # scrypt needs 128 * N * r bytes. Twice that leaves room for OpenSSL's own buffers.
        memory = 2 * 128 * self.rounds * self.blocks
        return hashlib.scrypt(
            password,
            salt=self.salt,
            n=self.rounds,
            r=self.blocks,
            p=self.lanes,
            maxmem=memory,
            dklen=_HASH_BYTES,
        )

    def matches(self, password: bytes) -> bool:
        """Return whether this is the hash of `password`, in constant time."""
        return hmac.compare_digest(self.hash(password), self.digest)


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("not base64") from None


def user_entry(name: str, password: str) -> str:
    """Return the line of a file of users for a name and a password.

    Raises `ValueError` for an invalid name or password.
    """
    if not 1 <= len(name.encode()) <= NAME_MAX or name != name.strip() or name.startswith("#"):
        raise ValueError(
            f"name: expected 1 to {NAME_MAX} bytes, without spaces around it and"
            " without a leading #"
        )
    if ":" in name or not name.isprintable():
        raise ValueError("name: expected printable characters without a colon")
    if not 1 <= len(password.encode()) <= PASSWORD_MAX or "\0" in password:
        raise ValueError(f"password: expected 1 to {PASSWORD_MAX} bytes without NUL")
    return f"{name}:{PasswordHash.of(password.encode()).encode()}"


def parse_users(text: str) -> Mapping[str, PasswordHash]:
    """Parse a file of users. Raises `UsersFileError`, which names the line but not its content."""
    users: dict[str, PasswordHash] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, separator, encoded = line.strip().partition(":")
        try:
            if not separator or not name:
                raise ValueError("expected NAME:HASH")
            if name in users:
                raise ValueError("the name is already in use")
            users[name] = PasswordHash.decode(encoded)
        except ValueError as error:
            raise UsersFileError(
                f"line {number}: {error}. Use `streammeta kafka-user NAME` to create a line"
            ) from None

    return users


class Users:
    """The users in a file, reloaded when it changes."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises `UsersFileError`."""
        self._path = path
        self._stamp, self._users = _read(path)
        # Hashed for unknown names, so that the time of an answer does not disclose which users
        # exist.
        self._nobody = PasswordHash.of(secrets.token_bytes(_SALT_BYTES))
        self._hashing = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._seal_key = secrets.token_bytes(_HASH_BYTES)
        self._known: dict[str, tuple[PasswordHash, bytes]] = {}

    async def verify_password(self, name: str, password: str) -> bool:
        """Return whether a user has this password.

        A correct password is cached as a keyed hash in memory, so that reconnecting clients do not
        queue after other clients' guesses.
        """
        self._renew()
        given = password.encode()
        entry = self._users.get(name)
        # The cache keeps no password: its key exists in this process alone.
        seal = hmac.digest(self._seal_key, given, "sha256")
        known = self._known.get(name)
        if known is not None and known[0] == entry and hmac.compare_digest(known[1], seal):
            return True
        # Without the limit, guesses of many connections would occupy all threads.
        async with self._hashing:
            is_right = await asyncio.to_thread((entry or self._nobody).matches, given)
        if not is_right or entry is None:
            return False
        self._known[name] = (entry, seal)
        return True

    def _renew(self) -> None:
        """Reload the file if it has changed. An unreadable file leaves the users unchanged."""
        try:
            if _stamp_of(self._path) != self._stamp:
                self._stamp, self._users = _read(self._path)
                # Deleted users lose their cached passwords immediately. Changed ones fail the
                # comparison of entries.
                self._known = {
                    name: entry for name, entry in self._known.items() if name in self._users
                }
        except (OSError, UsersFileError) as error:
            _log.warning("reloading the users failed, keeping the previous ones: %s", error)


_Stamp = tuple[int, int, int]


def _stamp_of(path: Path) -> _Stamp:
    found = os.stat(path)  # noqa: PTH116 - the stamp is of numbers that os.stat names
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[_Stamp, Mapping[str, PasswordHash]]:
    try:
        # The stamp precedes the read: a change in between is loaded at the next look.
        stamp = _stamp_of(path)
        if stamp[1] > FILE_MAX:
            raise UsersFileError(f"{path} has more than {FILE_MAX} bytes")
        return stamp, parse_users(path.read_text("utf-8"))
    except UsersFileError as error:
        raise UsersFileError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsersFileError(f"{path} is unreadable: {type(error).__name__}") from None
