"""Command line of the drills: runs one in a separate directory, and prints its figures.

It stops all controllers and removes the directory, unless the drill failed.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from scripts.demonstration.narrator import Narrator
from scripts.drills import disaster, far_back, majority, upgrade
from streammeta.cli.local.local_cluster import ChildFailedError

Drill: TypeAlias = Callable[[Path, Narrator], Mapping[str, object]]


def _run_disasters(root: Path, narrator: Narrator) -> Mapping[str, object]:
    """Carry out both drills of a disaster, each in a separate folder."""
    figures: dict[str, object] = {}
    for name, drill in (("directory", disaster.run), ("s3", far_back.run)):
        (root / name).mkdir()
        found = drill(root / name, narrator)
        figures |= {f"{name}_{figure}": value for figure, value in found.items()}
    return figures


DRILLS: Mapping[str, Drill] = MappingProxyType(
    {
        "disaster": _run_disasters,
        "disaster-directory": disaster.run,
        "disaster-s3": far_back.run,
        "majority": majority.run,
        "upgrade": upgrade.run,
    }
)
"""Drills by name. Each returns its figures, and raises if it does not succeed."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="drill",
        description="Practise rare tasks of an operator on real controllers.",
        epilog="example: ./scripts/drill upgrade --format json",
    )
    parser.add_argument("drill", choices=sorted(DRILLS))
    parser.add_argument("--format", choices=["table", "json"], default="table")
    return parser.parse_args()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run a drill, and return 0 if it succeeded."""
    arguments = _parse()
    signal.signal(signal.SIGTERM, _interrupt)
    program = f"drill {arguments.drill}"
    narrator = Narrator(as_json=arguments.format == "json", program=program)
    root = Path(tempfile.mkdtemp(prefix="streammeta-drill-"))
    try:
        figures = DRILLS[arguments.drill](root, narrator)
    except KeyboardInterrupt:
        narrator.step("interrupted; everything is stopped")
        shutil.rmtree(root)
        return 130
    except (AssertionError, ChildFailedError, RuntimeError, TimeoutError) as error:
        narrator.fail(f"{error}\nlogs and data of every controller are kept in {root}")
        return 1
    shutil.rmtree(root)
    narrator.summary({"drill": arguments.drill, "ok": True, **figures}, [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
