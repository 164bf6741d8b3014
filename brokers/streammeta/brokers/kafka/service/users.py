"""Users of a broker and their passwords: a file of scrypt hashes, and the check of a password.

Owns the format of the file, one `NAME:scrypt$N$R$P$SALT$HASH` a line, salt and hash in base64, and
that it is read again when it has changed. A password is compared in constant time, and an unknown
user costs what a known one does. Neither passwords nor hashes are ever logged or put into an error.
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
"""Passwords that are hashed at the same time: each takes 16 MiB and tens of ms of a core."""

_ROUNDS, _BLOCKS, _LANES = 1 << 14, 8, 1
_ROUNDS_MAX, _BLOCKS_MAX, _LANES_MAX = 1 << 17, 16, 8
_SALT_BYTES, _HASH_BYTES = 16, 32
_ENCODED = re.compile(r"scrypt\$([0-9]{1,9})\$([0-9]{1,4})\$([0-9]{1,4})\$([^$]+)\$([^$]+)")

_log = logging.getLogger(__name__)


class UsersFileError(Exception):
    """A file of users can't be read, or a line of it is no user; the message names both."""


@dataclass(frozen=True, slots=True, repr=False)
class PasswordHash:
    """Hash of a password by scrypt, with what it was made of."""

    rounds: int
    blocks: int
    lanes: int
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, password: bytes) -> PasswordHash:
        """Return a hash of a password with a salt of its own."""
        made = cls(_ROUNDS, _BLOCKS, _LANES, secrets.token_bytes(_SALT_BYTES), b"")
        return cls(made.rounds, made.blocks, made.lanes, made.salt, made.hash(password))

    @classmethod
    def decode(cls, text: str) -> PasswordHash:
        """Read what `encode` wrote. Raises `ValueError`, which has nothing of the text."""
        parts = _ENCODED.fullmatch(text)
        if parts is None:
            raise ValueError("no hash by scrypt")
        rounds, blocks, lanes = map(int, parts.groups()[:3])
        if rounds & (rounds - 1) or not (
            2 <= rounds <= _ROUNDS_MAX and 1 <= blocks <= _BLOCKS_MAX and 1 <= lanes <= _LANES_MAX
        ):
            raise ValueError("costs out of bounds")
        found = cls(rounds, blocks, lanes, _unbase64(parts[4]), _unbase64(parts[5]))
        if len(found.salt) < _SALT_BYTES or len(found.digest) != _HASH_BYTES:
            raise ValueError("salt or hash of a wrong length")
        return found

    def encode(self) -> str:
        """Return the text that stands for it in a file."""
        salt, digest = (base64.b64encode(one).decode() for one in (self.salt, self.digest))
        return f"scrypt${self.rounds}${self.blocks}${self.lanes}${salt}${digest}"

    def hash(self, password: bytes) -> bytes:
        """Return the hash of another password with the same salt and costs."""
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

    def is_of(self, password: bytes) -> bool:
        """Whether it was made of this password; takes as long for any."""
        return hmac.compare_digest(self.hash(password), self.digest)


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("no base64") from None


def user_entry(name: str, password: str) -> str:
    """Return the line of a file of users for a name and a password.

    Raises `ValueError` for a name or a password that can't be used.
    """
    if not 1 <= len(name.encode()) <= NAME_MAX or name != name.strip() or name.startswith("#"):
        raise ValueError(f"name: wanted 1 to {NAME_MAX} bytes, no space around it, no # first")
    if ":" in name or not name.isprintable():
        raise ValueError("name: wanted printable characters, and no colon")
    if not 1 <= len(password.encode()) <= PASSWORD_MAX or "\0" in password:
        raise ValueError(f"password: wanted 1 to {PASSWORD_MAX} bytes, and no NUL")
    return f"{name}:{PasswordHash.of(password.encode()).encode()}"


def parse_users(text: str) -> Mapping[str, PasswordHash]:
    """Read a file of users. Raises `UsersFileError`, which names the line and not its content."""
    users: dict[str, PasswordHash] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, separator, encoded = line.strip().partition(":")
        try:
            if not separator or not name:
                raise ValueError("no NAME:HASH")
            if name in users:
                raise ValueError("this name is there already")
            users[name] = PasswordHash.decode(encoded)
        except ValueError as error:
            raise UsersFileError(
                f"line {number}: {error}; `streammeta kafka-user NAME` makes a line"
            ) from None
    return users


class Users:
    """The users of a file, as it is now."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises `UsersFileError`."""
        self._path = path
        self._stamp, self._users = _read(path)
        self._nobody = PasswordHash.of(secrets.token_bytes(_SALT_BYTES))
        self._hashing = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._seal_key = secrets.token_bytes(_HASH_BYTES)
        self._known: dict[str, tuple[PasswordHash, bytes]] = {}

    async def are(self, name: str, password: str) -> bool:
        """Whether a user has this password.

        A password that was right is remembered, by a keyed hash in memory, so that clients that
        connect again need not wait behind others' guesses.
        """
        self._renew()
        given = password.encode()
        entry = self._users.get(name)
        seal = hmac.digest(self._seal_key, given, "sha256")
        known = self._known.get(name)
        if known is not None and known[0] == entry and hmac.compare_digest(known[1], seal):
            return True
        async with self._hashing:
            is_right = await asyncio.to_thread((entry or self._nobody).is_of, given)
        if not is_right or entry is None:
            return False
        self._known[name] = (entry, seal)
        return True

    def _renew(self) -> None:
        """Read the file again if it has changed; one that can't be read leaves all as it was."""
        try:
            if _stamp_of(self._path) != self._stamp:
                self._stamp, self._users = _read(self._path)
                self._known = {
                    name: one for name, one in self._known.items() if name in self._users
                }
        except (OSError, UsersFileError) as error:
            _log.warning("the users stay what they were: %s", error)


_Stamp = tuple[int, int, int]


def _stamp_of(path: Path) -> _Stamp:
    found = os.stat(path)  # noqa: PTH116 - the stamp is of numbers that os.stat names
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[_Stamp, Mapping[str, PasswordHash]]:
    try:
        stamp = _stamp_of(path)
        if stamp[1] > FILE_MAX:
            raise UsersFileError(f"{path} has more than {FILE_MAX} bytes")
        return stamp, parse_users(path.read_text("utf-8"))
    except UsersFileError as error:
        raise UsersFileError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsersFileError(f"{path} can't be read: {type(error).__name__}") from None
