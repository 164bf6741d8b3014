"""Errors of reconciliation. Each message ends with the next step.

No error means that an object still known to the metadata was deleted. A plan is either complete or
absent.
"""

from __future__ import annotations

from streammeta.storage.errors import StorageError


class ReconcileError(StorageError):
    """Base of the errors of this package."""


class ConfigurationError(ReconcileError):
    """Options are contradictory, or a required program is not installed."""


class ControllerError(ReconcileError):
    """No controller gave a usable answer, without which nothing may be deleted."""


class PlanError(ReconcileError):
    """A plan directory can't be written, can't be read, or must not be applied."""


class LeaseError(ReconcileError):
    """Another run deletes in the bucket, or took over from this one."""


class MetadataExportError(ReconcileError):
    """The copy of the metadata can't be fetched or read, so nothing can be compared."""


class InventoryError(ReconcileError):
    """An inventory is damaged, belongs to another bucket, or has too few columns for a plan."""


class SparkJobError(ReconcileError):
    """A Spark stage failed. The message contains the executor's reason."""
