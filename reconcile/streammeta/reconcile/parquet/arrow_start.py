"""Start of Arrow without pandas, and the return of memory that it and numpy have freed.

Arrow imports pandas once, at its first conversion, if it is installed, as with Spark. That takes
more than a second of one core. Later imports of pandas work as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PANDAS = "pandas"


class _Hiding(MetaPathFinder):
    """Import hook that hides pandas and no other module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise `ModuleNotFoundError` for pandas. Other names are left to the next finder."""
        if fullname == _PANDAS:
            raise ModuleNotFoundError("pandas is hidden while Arrow starts", name=_PANDAS)
        return None


def start_arrow() -> None:
    """Make Arrow's first conversion while pandas is hidden.

    Call it at the start of a program: another thread that imports pandas meanwhile would fail.
    """
    import pyarrow as pa

    # Imported already, so there is nothing to save.
    if _PANDAS in sys.modules:
        return
    hiding = _Hiding()
    sys.meta_path.insert(0, hiding)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(hiding)


def return_memory() -> None:
    """Return free memory to the system, at the end of a stage of the work.

    Allocators keep freed memory for the thread that had it, and each stage has other threads.
    """
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    pa.system_memory_pool().release_unused()  # numpy's too: it asks the C library
