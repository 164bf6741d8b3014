"""Opening of object stores by address, without connections or file access.

`check()` on the opened store finds out whether it is usable.
"""

from urllib.parse import unquote, urlsplit

from streammeta.storage.installation import optional_packages
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.protocol.address import S3Config, StoreAddress
from streammeta.storage.object_store.protocol.base import ObjectStore


def open_object_store(address: StoreAddress | str) -> ObjectStore:
    """Open the store of an address: `s3://bucket?options` or `file:///absolute/directory`.

    Raises `ValueError` for an invalid address, and `MissingPackageError` for an S3 address without
    boto3, which the extra `s3` installs.
    """
    parsed = address if isinstance(address, StoreAddress) else StoreAddress.parse(address)
    if not isinstance(parsed.target, S3Config):
        return LocalObjectStore(parsed.target)
    with optional_packages("an s3:// address"):
        from streammeta.storage.object_store.s3.s3 import S3ObjectStore  # botocore loads slowly

    return S3ObjectStore(parsed.target)


def open_with_path(address: str) -> tuple[ObjectStore, str]:
    """Open the bucket of `s3://bucket/path?options`, and return it and the decoded path.

    Raises the errors of `open_object_store`.
    """
    # Only commands and inventories name a path. Stores of a cluster are whole buckets.
    parts = urlsplit(address)
    query = f"?{parts.query}" if parts.query else ""
    return open_object_store(f"{parts.scheme}://{parts.netloc}{query}"), unquote(parts.path[1:])
