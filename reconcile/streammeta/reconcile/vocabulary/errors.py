"""Errors of reconciliation; each message ends with the next thing to do.

Whatever is raised, nothing was deleted that the map still knew, and a plan is either complete or
absent.
"""

from __future__ import annotations

from streammeta.storage.errors import StorageError


class ReconcileError(StorageError):
    """Base of the errors of this package."""


class ConfigurationError(ReconcileError):
    """Contradictory options, or a needed program that is not installed."""


class ControllerError(ReconcileError):
    """No controller gave a usable answer; without one nothing may be deleted."""


class PlanError(ReconcileError):
    """A plan directory can't be written, can't be read, or must not be applied."""


class LeaseError(ReconcileError):
    """Another run deletes in the bucket, or has taken over from this one."""


class MetadataExportError(ReconcileError):
    """The copy of the map can't be fetched or read, so nothing can be compared with it."""


class InventoryError(ReconcileError):
    """An inventory is damaged, is of another bucket, or lacks what a plan needs of it."""


class SparkJobError(ReconcileError):
    """A Spark stage failed; the message carries the reason that the executor gave."""
