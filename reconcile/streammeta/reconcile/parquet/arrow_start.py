"""Start of Arrow without pandas, and the return of memory that it and numpy have freed.

Arrow looks for pandas once, at its first conversion, and takes more than a second of one core to
import it if it is installed, as it is beside Spark. What needs pandas later, still gets it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PANDAS = "pandas"


class _Hiding(MetaPathFinder):
    """Says of pandas, and of nothing else, that it is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise `ModuleNotFoundError` for pandas; leave every other name to the next finder."""
        if fullname == _PANDAS:
            raise ModuleNotFoundError("pandas is hidden while Arrow starts", name=_PANDAS)
        return None


def start_arrow() -> None:
    """Have Arrow make its first conversion with pandas hidden from it.

    For the start of a program: another thread that imported pandas at this moment would fail.
    """
    import pyarrow as pa

    if _PANDAS in sys.modules:
        return
    hiding = _Hiding()
    sys.meta_path.insert(0, hiding)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(hiding)


def return_memory() -> None:
    """Give memory that is free back to the system, for the end of a stage of the work.

    Allocators keep what was freed for the thread that had it, and each stage has threads of its
    own.
    """
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    pa.system_memory_pool().release_unused()  # numpy's too: it asks the C library
