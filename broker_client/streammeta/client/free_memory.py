"""Giving freed memory back to the system.

The records of a batch are many pieces of memory, freed when they move into an object. The C library
keeps such pieces, and a buffer that is full of objects would hold them beside it, beyond its bound.
"""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return free pages of the heap; where the C library can't do that, do nothing."""
    if _TRIM is not None:
        _TRIM(0)


def _find_trim() -> ctypes._NamedFuncPointer | None:
    trim: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


_TRIM = _find_trim()
