"""What can stop a reconciliation, each with the next thing to do.

Whatever is raised, nothing was deleted that the map did not give free, and a plan is either whole
or not there at all.
"""

from __future__ import annotations

from streammeta.storage.errors import StorageError


class ReconcileError(StorageError):
    """The common base of what this package raises of its own."""


class ConfigurationError(ReconcileError):
    """What was asked for contradicts itself, or a needed program is not installed."""


class ControllerError(ReconcileError):
    """No controller gave a usable answer; without one nothing may be deleted."""


class PlanError(ReconcileError):
    """A plan directory can't be written, can't be read, or must not be applied."""


class MapExportError(ReconcileError):
    """The copy of the map can't be fetched or read, so nothing can be compared with it."""


class SparkJobError(ReconcileError):
    """A Spark stage failed; the message carries the reason that the executor gave."""
