"""From the address of a store, as users write it, to the store.

Owns which schemes there are: `s3://` (see `S3Config.from_uri`) and `file://`. Opens no connection
and touches no file; call `check()` on what it gives to learn whether the store can be used.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from streammeta.storage.object_store.base import ObjectStore
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.metrics import CallObserver

_PUBLIC_PARAMETERS = frozenset({"endpoint", "region", "pathStyle"})


def open_object_store(uri: str, *, observer: CallObserver | None = None) -> ObjectStore:
    """Open `s3://bucket?options` or `file:///absolute/directory`; `observer` hears of every call.

    Raises `ValueError` saying what is wrong with the address.
    """
    if not isinstance(uri, str):
        raise TypeError(
            f"uri is {uri!r}, a {type(uri).__name__}; wanted a str: s3://bucket?options or"
            " file:///absolute/directory"
        )
    scheme = uri.partition("://")[0] if "://" in uri else ""
    if scheme == "s3":
        from streammeta.storage.object_store.s3 import S3ObjectStore  # botocore is slow to import
        from streammeta.storage.object_store.s3_address import S3Config

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


def without_secrets(uri: str) -> str:
    """Give a store's address with bucket, endpoint and region alone: fit for logs and files."""
    parts = urlsplit(_bucket_form(uri))
    shown = [pair for pair in parse_qsl(parts.query) if pair[0] in _PUBLIC_PARAMETERS]
    query = urlencode(
        [(name, _without_user(value) if name == "endpoint" else value) for name, value in shown],
        safe=":/",
    )
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, query, ""))


def _bucket_form(uri: str) -> str:
    """The same bucket in the form that starts with it; other addresses as they are."""
    if "s3-data-bucket" not in urlsplit(uri).query:
        return uri
    from streammeta.storage.object_store.s3_address import S3Config

    try:
        return S3Config.from_uri(uri).to_uri()
    except ValueError:
        return uri


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
