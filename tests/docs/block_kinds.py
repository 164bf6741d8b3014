"""Ways in which a code block of the documentation is tested, each with what it needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ran:
    """Executed as it is printed, but for addresses and folders.

    Blocks of one `scene` share a cluster and its folder, and run in the order of the table. Python
    gets the names of `setting` (see block_settings.py). `skipped` are lines that are not run.
    """

    scene: str = "shared"
    setting: str = ""
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class RanBy:
    """Executed by another test, which is named as for pytest."""

    test: str


@dataclass(frozen=True)
class Parsed:
    """Not executed, for a reason. Commands are parsed, names of files and imports are looked up."""

    reason: str


@dataclass(frozen=True)
class Drawn:
    """No code: output, a layout of bytes, a diagram."""

    shows: str


Kind = Ran | RanBy | Parsed | Drawn
