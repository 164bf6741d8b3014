"""Errors of reads of offloaded ledgers. `code` is the peer's name."""

from __future__ import annotations


class NoSuchLedgerError(Exception):
    """An object of the ledger does not exist."""

    code = "NoSuchLedgerExists"


class IncorrectParameterError(ValueError):
    """A read names entries that the ledger does not have."""

    code = "IncorrectParameter"


class OffloadReadHandleClosedError(Exception):
    """A read came after the handle was closed."""

    code = "OffloadReadHandleClosed"
