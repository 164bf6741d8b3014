"""Errors of a recovery: each names what is wrong, and what to do instead."""

from __future__ import annotations


class RecoveryError(Exception):
    """A recovery is refused; nothing was changed. `code` is for programs, `hint` for people."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint
