"""Plots of growth as PNG files. They need matplotlib, which the rest of the benchmarks does not."""

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.figures import BenchmarkError

DPI = 110
SIZE_INCHES = (6.4, 3.8)
INSTALL = ".venv/bin/python -m pip install -c scripts/constraints.txt -e '.[plots]'"


class PlotError(BenchmarkError):
    """Plots can't be drawn."""


def require_library() -> Any:
    """Return matplotlib's module of figures, by name, because the project doesn't know its types.

    Raises:
        PlotError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise PlotError(f"--plot: needs matplotlib; install it with: {INSTALL}") from None


def plot(
    path: Path,
    labels: tuple[str, str],
    across: Sequence[float],
    lines: Mapping[str, Sequence[float | None]],
) -> None:
    """Draw lines over `across` with logarithmic axes. `labels` name x and y.

    Raises:
        PlotError: matplotlib is not installed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = require_library().Figure(figsize=SIZE_INCHES)
    axes = figure.subplots()
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
