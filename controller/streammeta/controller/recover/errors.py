"""Errors of a recovery: each names the problem and the next step."""

from __future__ import annotations


class RecoveryError(Exception):
    """A recovery is rejected and nothing was changed. `code` is for programs, `hint` for people."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint
