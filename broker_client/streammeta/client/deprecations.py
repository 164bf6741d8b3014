"""Former names of the public API, which stay for one version."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from streammeta.client.config import SilentObserver, UploadObserver

_MOVED_TO = ("streammeta.client.errors", "streammeta.client.parts")
"""Modules whose names were at the top level of the package."""

_RENAMED = {
    "BucketRefusedError": "BucketRejectedError",
    "MapOlderThanBucketError": "MetadataOlderThanBucketError",
    "RefusedError": "RejectedError",
}
"""Present name by former name."""

RejectionCallback = Callable[[Sequence[int], Exception], Awaitable[None]]


def find_renamed(module: str, name: str) -> Any:
    """Return what a former name of `module` stands for, with a `DeprecationWarning`.

    Raises `AttributeError` for any other name.
    """
    new_name = _RENAMED.get(name, name)
    for owner in _MOVED_TO:
        # Imported on use: the former names cost nothing otherwise.
        found = getattr(importlib.import_module(owner), new_name, None)
        if callable(found):
            # Level 3 is the code that uses the name: it calls the module's `__getattr__`, which
            # calls this.
            warnings.warn(
                f"{module}.{name} is deprecated, use {owner}.{new_name}",
                DeprecationWarning,
                stacklevel=3,
            )
            return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def find_rejection_callback(observer: UploadObserver) -> RejectionCallback:
    """Return `on_rejected` of `observer`, or its `on_refused` if it implements only that one.

    `on_refused` is the former name of the method and causes a `DeprecationWarning`.
    """
    former: RejectionCallback | None = getattr(observer, "on_refused", None)
    inherited = (None, SilentObserver.on_rejected, UploadObserver.on_rejected)
    # An observer for both versions implements both methods: the current one is called.
    if former is None or getattr(type(observer), "on_rejected", None) not in inherited:
        return observer.on_rejected

    # Level 4 is the code that creates the writer, which creates the uploader, which calls this.
    warnings.warn(
        f"{type(observer).__name__}.on_refused is deprecated, rename it to on_rejected",
        DeprecationWarning,
        stacklevel=4,
    )
    return former
