"""From the address of a store, as users write it, to the store.

Owns which schemes there are: `s3://` (see `S3Config.from_uri`) and `file://`. Opens no connection
and touches no file; call `check()` on what it gives to learn whether the store can be used.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from storage.object_store.base import ObjectStore
from storage.object_store.local import LocalObjectStore
from storage.object_store.metrics import CallObserver


def open_object_store(uri: str, *, observer: CallObserver | None = None) -> ObjectStore:
    """Open `s3://bucket?options` or `file:///absolute/directory`; `observer` hears of every call.

    Raises `ValueError` saying what is wrong with the address.
    """
    scheme = uri.partition("://")[0] if "://" in uri else ""
    if scheme == "s3":
        from storage.object_store.s3 import S3ObjectStore  # botocore is slow to import
        from storage.object_store.s3_address import S3Config

        return S3ObjectStore(S3Config.from_uri(uri), observer=observer)
    if scheme == "file":
        return LocalObjectStore(_directory_of(uri), observer)
    raise ValueError(
        f"object store address is {uri.partition('?')[0]!r}, wanted s3://bucket?options or"
        " file:///absolute/directory"
    )


def _directory_of(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ValueError(f"directory address is {uri!r}, wanted file:///absolute/directory")
    return Path(unquote(parts.path))
