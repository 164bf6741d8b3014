"""Address of the store that a plan is of: opened, and compared with another.

Two addresses name the same place only if scheme, endpoint and bucket, or the folder, are the same.
What lies there is not looked at; see `identity`.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from streammeta.reconcile.errors import ConfigurationError
from streammeta.storage.errors import StorageError
from streammeta.storage.object_store.address import S3Config, open_object_store, without_secrets
from streammeta.storage.object_store.base import ObjectStore

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_AMAZON = "Amazon S3"


def open_store(uri: str) -> ObjectStore:
    """Open the store and make sure that it answers.

    Raises:
        ConfigurationError: `uri` does not name a store.
        StorageError: there is no such bucket, the credentials are wrong, or it does not answer.
    """
    try:
        store = open_object_store(uri)
    except ValueError as error:
        raise _no_store(uri, error) from error
    try:
        store.check()
    except StorageError:
        store.close()
        raise
    return store


def place_of(uri: str) -> str:
    """The place that a store URI names, in one spelling: bucket and endpoint, or the folder.

    An endpoint that is not in the URI is that of the environment, or else Amazon's.

    Raises:
        ConfigurationError: `uri` does not name a store.
    """
    try:
        if urlsplit(uri).scheme == "file":
            return Path(unquote(urlsplit(uri).path)).resolve().as_uri()
        config = S3Config.from_uri(uri)
        from_environment = (os.environ.get(name) for name in _ENDPOINT_VARIABLES)
        endpoint = config.endpoint_url or next(filter(None, from_environment), None)
        return f"s3://{config.bucket} at {_AMAZON if endpoint is None else _normal(endpoint)}"
    except ValueError as error:
        raise _no_store(uri, error) from error


def _normal(endpoint: str) -> str:
    """The endpoint without what does not change where it leads: case, default port, user."""
    parts = urlsplit(endpoint)
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    return f"{parts.scheme}://{parts.hostname}:{port}{parts.path.rstrip('/')}"


def _no_store(uri: str, error: ValueError) -> ConfigurationError:
    return ConfigurationError(
        f"--store {without_secrets(uri)!r} does not name a store ({error}); wanted"
        " s3://BUCKET?endpoint=URL or file:///FOLDER"
    )
