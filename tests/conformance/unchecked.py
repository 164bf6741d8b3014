"""Lets a map take states in that no map of ours can be in.

Scenarios of another vocabulary replay records that say what one row is from now on, so between two
of them streams lack their range or objects their owner, and sizes are negative. What the checks of
checkpoints and records refuse is not theirs to tell; `tests/metadata` does.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import streammeta.controller.metadata.object_ranges as object_ranges
import streammeta.controller.metadata.restore as restore
from streammeta.controller.metadata.record_checks import RecordChecks
from streammeta.controller.metadata.section_rules import SectionChecker

_CHECKS = (
    (SectionChecker, "check"),
    (RecordChecks, "check"),
    (restore, "check_ends"),
    (object_ranges, "check_apart"),
)


@contextmanager
def unchecked() -> Iterator[None]:
    """Leave the checks of what is loaded and replayed out."""
    with ExitStack() as patches:
        for owner, name in _CHECKS:
            patches.enter_context(patch.object(owner, name, lambda *_: None))
        yield
