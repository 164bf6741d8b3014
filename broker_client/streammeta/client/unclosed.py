"""The warning of what was dropped without `close`, as Python's own files and event loops give it.

Python shows a `ResourceWarning` with `-X dev` or `-W default`, and test runners show it always.
"""

from __future__ import annotations

import warnings


def warn_unclosed(owner: object, lost: str, how: str) -> None:
    """Warn, from the `__del__` of `owner`, of what is `lost` and `how` to close it."""
    warnings.warn(
        f"{type(owner).__name__} was dropped without close: {lost}; {how}",
        ResourceWarning,
        stacklevel=2,
        source=owner,
    )
