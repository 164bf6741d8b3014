"""Plots of the map's growth, as PNG files. Needs matplotlib, which nothing else here does."""

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.map_growth import Growth

DPI = 110
SIZE_INCHES = (6.4, 3.8)
INSTALL = ".venv/bin/python -m pip install -c scripts/constraints.txt -e '.[plots]'"


class PlotError(Exception):
    """Plots can't be drawn."""


def drawing_library() -> Any:
    """Return the module that has figures; by name, as the project doesn't know its types.

    Raises:
        PlotError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise PlotError(f"--plot: needs matplotlib; install it with: {INSTALL}") from None


def draw(folder: Path, growth: Growth) -> list[Path]:
    """Write the plots into `folder` and return their paths.

    Raises:
        PlotError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts = [each["entities"] for each in growth.maps]
    memory = {
        "streams with their ranges": _scaled(growth.maps, "stream_bytes"),
        "objects": _scaled(growth.maps, "object_bytes"),
    }
    commits = {
        f"{ranges} ranges, {name}": [each.get(f"commit_{ranges}_{name}_ms") for each in growth.maps]
        for ranges in (1, 100, 1_600)
        for name in ("p50", "p99")
    }
    times = {
        "write a checkpoint": [each["checkpoint_write_s"] for each in growth.maps],
        "load it": [each["checkpoint_load_s"] for each in growth.maps],
        "restart to first answer": [each.restart_s for each in growth.restarts],
    }
    reads = {
        f"at most {limit} objects, {name}": [
            each[f"read_{limit}_{name}_ms"] for each in growth.reads
        ]
        for limit in (10, 1_000)
        for name in ("p50", "p99")
    }
    set_objects = [each["set_objects"] for each in growth.reads]
    entities = "streams, and as many objects"
    return [
        plot(folder / "map-memory.png", (entities, "MB above empty"), counts, memory),
        plot(folder / "map-commits.png", (entities, "ms of CPU a commit"), counts, commits),
        plot(folder / "map-checkpoints.png", (entities, "seconds"), counts, times),
        plot(folder / "map-reads.png", ("set objects", "ms of CPU a read"), set_objects, reads),
    ]


def _scaled(maps: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [each[name] * each["entities"] / 1e6 for each in maps]


def plot(
    path: Path,
    labels: tuple[str, str],
    across: Sequence[float],
    lines: Mapping[str, Sequence[float | None]],
) -> Path:
    """Draw lines over `across`, both axes by powers of ten, with labels of the axes (x, y)."""
    axes, figure = _axes()
    for name, values in lines.items():
        known = [(x, y) for x, y in zip(across, values, strict=True) if y is not None]
        axes.plot([x for x, _ in known], [y for _, y in known], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    # Whole decades, so that noise does not look like growth.
    low, high = axes.get_ylim()
    axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    return path


def _axes() -> tuple[Any, Any]:
    figure = drawing_library().Figure(figsize=SIZE_INCHES)
    return figure.subplots(), figure
