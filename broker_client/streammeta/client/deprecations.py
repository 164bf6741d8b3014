"""Former names of the public API, which stay for one version."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, str] = {
    "MapOlderThanBucketError": "streammeta.client.errors.MetadataOlderThanBucketError",
}
"""New full name by former name at the top level of the package."""


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
