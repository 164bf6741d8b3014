"""Opening of object stores by address, without connections or file access.

`check()` on the opened store finds out whether it is usable.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from streammeta.storage.installation import optional_packages
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.protocol.address import S3Config
from streammeta.storage.object_store.protocol.base import ObjectStore


def open_object_store(uri: str) -> ObjectStore:
    """Open `s3://bucket?options` or `file:///absolute/directory`.

    Raises `ValueError` for an invalid address, and `MissingPackageError` for an S3 address without
    boto3, which the extra `s3` installs.
    """
    if not isinstance(uri, str):
        raise TypeError(
            f"uri is {uri!r}, a {type(uri).__name__}, expected a str: s3://bucket?options or"
            " file:///absolute/directory"
        )
    scheme = uri.partition("://")[0] if "://" in uri else ""
    if scheme == "s3":
        with optional_packages("an s3:// address"):
            from streammeta.storage.object_store.s3.s3 import S3ObjectStore  # botocore loads slowly

        return S3ObjectStore(S3Config.from_uri(uri))
    if scheme == "file":
        return LocalObjectStore(_directory_of(uri))
    raise ValueError(
        f"object store address is {uri.partition('?')[0]!r}, expected s3://bucket?options or"
        " file:///absolute/directory"
    )


def open_with_path(address: str) -> tuple[ObjectStore, str]:
    """Open the bucket of `s3://bucket/path?options`, and return it and the decoded path.

    Raises the errors of `open_object_store`.
    """
    # Only commands and inventories name a path. Stores of a cluster are whole buckets.
    parts = urlsplit(address)
    query = f"?{parts.query}" if parts.query else ""
    return open_object_store(f"{parts.scheme}://{parts.netloc}{query}"), unquote(parts.path[1:])


def _directory_of(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ValueError(f"directory address is {uri!r}, expected file:///absolute/directory")
    return Path(unquote(parts.path))
