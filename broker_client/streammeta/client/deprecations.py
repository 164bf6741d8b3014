"""Former names of the public API, which stay for one version."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from streammeta.client.config import SilentObserver, UploadObserver

_MOVED = {
    "streammeta.client.errors": (
        "AccessDeniedError",
        "BrokerClientError",
        "BucketNotFoundError",
        "ChangesLostError",
        "ClientClosedError",
        "CompactedObjectsNotFoundError",
        "ControllerDefectError",
        "ControllerUnavailableError",
        "CorruptObjectError",
        "DamagedLogError",
        "DamagedSlotError",
        "DeadlineExceededError",
        "FailoverSupersededError",
        "FailoverUnsettledError",
        "ForkedProcessError",
        "InvalidKeyError",
        "InvalidRequestError",
        "KeyConflictError",
        "KeyNotFoundError",
        "LimitExceededError",
        "LogLockedError",
        "LogMissingError",
        "LogSealedError",
        "LogSweptError",
        "MetadataOlderThanBucketError",
        "MissingObjectError",
        "MissingPackageError",
        "NodeEpochExpiredError",
        "NodeFencedError",
        "NodeLockedError",
        "NodeNotRegisteredError",
        "ObjectContentMismatchError",
        "ObjectExistsError",
        "ObjectExpiredError",
        "ObjectLogFailedError",
        "ObjectNotCommittedError",
        "ObjectNotFoundError",
        "OffsetMismatchError",
        "OffsetTrimmedError",
        "OutcomeUnknownError",
        "PayloadError",
        "PermissionDeniedError",
        "ProtocolViolationError",
        "RangeNotSatisfiableError",
        "ReadDeadlineError",
        "ReaderClosedError",
        "RecoveryNeededError",
        "StorageError",
        "StoreRejectedError",
        "StoreUnavailableError",
        "StreamEpochMismatchError",
        "StreamFailedError",
        "StreamFencedError",
        "StreamNotClosedError",
        "StreamNotFoundError",
        "StreamNotOpenedError",
        "TlsError",
        "UnfitStoreError",
        "UnsupportedError",
        "UploadFailedError",
        "UploadNotFoundError",
        "WriteAheadLogBrokenError",
        "WriteAheadLogClosedError",
        "WriteAheadLogError",
        "WriteAheadLogFullError",
        "WriterClosedError",
        "WrongBucketError",
        "WrongLogError",
    ),
    "streammeta.client.parts": (
        "AsideRun",
        "BrokerSession",
        "CommitPipeline",
        "ControllerClient",
        "Deviation",
        "EffectsVerdict",
        "FailoverWorker",
        "Heartbeat",
        "HeartbeatAnswer",
        "Located",
        "LogIdentity",
        "ObjectLog",
        "Recovery",
        "Slice",
        "StreamQuery",
        "StreamReader",
        "StreamTrim",
        "StreamWriter",
        "Upload",
        "UploadVerdict",
        "UploadWithEffects",
        "WriteAheadLog",
        "read_aside",
    ),
}
"""Names that moved from the top level of the package, by their module."""

RENAMED: Mapping[str, str] = {
    **{name: f"{module}.{name}" for module, names in _MOVED.items() for name in names},
    "BucketRefusedError": "streammeta.client.errors.BucketRejectedError",
    "MapOlderThanBucketError": "streammeta.client.errors.MetadataOlderThanBucketError",
    "RefusedError": "streammeta.client.errors.RejectedError",
}
"""New full name by former name at the top level of the package."""

RejectionCallback = Callable[[Sequence[int], Exception], Awaitable[None]]


def find_renamed(module: str, name: str) -> Any:
    """Return what a former name of `module` stands for, with a `DeprecationWarning`.

    Raises `AttributeError` for any other name.
    """
    new_name = RENAMED.get(name)
    if new_name is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    # Level 3 is the code that uses the name: it calls the module's `__getattr__`, which calls this.
    warnings.warn(
        f"{module}.{name} is deprecated, use {new_name}", DeprecationWarning, stacklevel=3
    )
    # Imported on use: the former names cost nothing otherwise.
    owner, _, attribute = new_name.rpartition(".")
    return getattr(importlib.import_module(owner), attribute)


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
