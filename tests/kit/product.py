"""The source files of the product's packages."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("controller", "commands", "storage", "reconcile", "brokers", "broker_client", "proto")


def sources() -> Iterator[tuple[str, str]]:
    """Yield the path below `ROOT` and the text of every module of the product."""
    for part in PARTS:
        for path in sorted((ROOT / part / "streammeta").rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()
