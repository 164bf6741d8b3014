"""Interface of named bytes with user metadata, and a backend in memory.

An upload in parts appears once it is completed. Knows nothing of ledgers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class BlobError(Exception):
    """The backend failed. The written data may exist or not."""


class NoSuchBlobError(Exception):
    """No blob has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"object {name!r} does not exist. Offload the ledger again")


class BlobUpload(Protocol):
    """An upload in parts, numbered from 1."""

    async def part(self, number: int, data: bytes) -> None:
        """Upload a part. Raise `BlobError`."""
        ...

    async def complete(self) -> None:
        """Create the blob from its parts. Raise `BlobError`."""
        ...

    async def abort(self) -> None:
        """Drop the upload. May be repeated."""
        ...


class Blobs(Protocol):
    """A place for blobs. Every call may raise `BlobError`."""

    async def begin(self, name: str, metadata: Mapping[str, str]) -> BlobUpload:
        """Begin an upload in parts."""
        ...

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str]) -> None:
        """Store a blob at once."""
        ...

    async def read(self, name: str, start: int, length: int) -> bytes:
        """Return bytes, fewer at the end. Raise `NoSuchBlobError`."""
        ...

    async def metadata(self, name: str) -> Mapping[str, str]:
        """Return the user metadata. Raise `NoSuchBlobError`."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Delete blobs. A missing one counts as deleted."""
        ...

    async def names(self) -> Sequence[str]:
        """List all blobs of this place."""
        ...


@dataclass(slots=True)
class MemoryBlobs:
    """Blobs in memory. `fails` names calls that raise `BlobError`, for tests."""

    kept: dict[str, tuple[bytes, dict[str, str]]] = field(default_factory=dict)
    fails: set[str] = field(default_factory=set)

    def check(self, call: str) -> None:
        """Raise `BlobError` if the call should fail."""
        if call in self.fails:
            raise BlobError(f"{call} failed")

    async def begin(self, name: str, metadata: Mapping[str, str]) -> MemoryUpload:
        """Begin an upload in parts."""
        self.check("begin")
        return MemoryUpload(self, name, dict(metadata))

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str]) -> None:
        """Store a blob."""
        self.check("put")
        self.kept[name] = (data, dict(metadata))

    async def read(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of a blob."""
        self.check("read")
        if name not in self.kept:
            raise NoSuchBlobError(name)
        return self.kept[name][0][start : start + length]

    async def metadata(self, name: str) -> Mapping[str, str]:
        """Return the user metadata of a blob."""
        if name not in self.kept:
            raise NoSuchBlobError(name)
        return self.kept[name][1]

    async def delete(self, names: Sequence[str]) -> None:
        """Delete blobs."""
        self.check("delete")
        for name in names:
            self.kept.pop(name, None)

    async def names(self) -> list[str]:
        """List all blobs."""
        return sorted(self.kept)


@dataclass(slots=True)
class MemoryUpload:
    """An upload in parts to memory."""

    blobs: MemoryBlobs
    name: str
    metadata: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)

    async def part(self, number: int, data: bytes) -> None:
        """Store a part."""
        self.blobs.check("part")
        self.parts[number] = data

    async def complete(self) -> None:
        """Create the blob from its parts."""
        self.blobs.check("complete")
        data = b"".join(data for _, data in sorted(self.parts.items()))
        self.blobs.kept[self.name] = (data, self.metadata)

    async def abort(self) -> None:
        """Drop the parts."""
        self.parts.clear()
