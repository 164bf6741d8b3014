"""Where `streammeta snapshot export` writes: a directory, or a prefix in a bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from streammeta.controller.config import ConfigError
from streammeta.controller.snapshot.parquet_export import ExportTarget
from streammeta.storage.object_store.address import open_object_store
from streammeta.storage.object_store.base import ObjectStore

_UNFINISHED = ".part"


def open_target(address: str) -> ExportTarget:
    """Open a directory, or `s3://bucket/prefix?options`; creates the directory.

    Raises:
        ConfigError: the address does not parse.
        StorageError: the bucket can't be used.
        OSError: the directory can't be used.
    """
    if "://" not in address:
        path = Path(address)
        path.mkdir(parents=True, exist_ok=True)
        return DirectoryTarget(path)
    parts = urlsplit(address)
    if parts.scheme != "s3":
        raise ConfigError(f"--to: {address!r}; wanted a directory or s3://bucket/prefix?options")
    query = f"?{parts.query}" if parts.query else ""
    try:
        store = open_object_store(f"s3://{parts.netloc}{query}")
    except ValueError as error:
        raise ConfigError(f"--to: {error}") from error
    store.check()
    return StoreTarget(store, unquote(parts.path).strip("/"))


class DirectoryTarget:
    """Files in one directory; each is written under another name, flushed, then renamed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> Iterator[str]:
        """See `ExportTarget.names`; what a crash left half-written does not count."""
        return (entry.name for entry in self._path.iterdir() if entry.suffix != _UNFINISHED)

    def read(self, name: str) -> bytes:
        """See `ExportTarget.read`."""
        return (self._path / name).read_bytes()

    def write(self, name: str, data: memoryview) -> None:
        """See `ExportTarget.write`."""
        unfinished = self._path / (name + _UNFINISHED)
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._path / name)

    def delete(self, name: str) -> None:
        """See `ExportTarget.delete`."""
        (self._path / name).unlink(missing_ok=True)


class StoreTarget:
    """Objects of a store whose keys begin with `prefix`, or all of them if it is empty."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = f"{prefix}/" if prefix else ""

    def names(self) -> Iterator[str]:
        """See `ExportTarget.names`."""
        for found in self._store.list_objects(self._prefix):
            yield found.key.removeprefix(self._prefix)

    def read(self, name: str) -> bytes:
        """See `ExportTarget.read`."""
        return self._store.get_range(self._prefix + name)

    def write(self, name: str, data: memoryview) -> None:
        """See `ExportTarget.write`."""
        self._store.put(self._prefix + name, data)

    def delete(self, name: str) -> None:
        """See `ExportTarget.delete`; why one can't be deleted is raised."""
        failed = self._store.delete_many([self._prefix + name]).failed
        if failed:
            raise OSError("; ".join(f"{key}: {why}" for key, why in failed.items()))
