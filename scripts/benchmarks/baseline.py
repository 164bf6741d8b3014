"""Two commits measured in one run: the same benchmark, these scripts, alternating.

The earlier commit is unpacked into a directory of its own and given these very scripts, so only the
product differs. The order changes from round to round, so that a machine that grows busier does not
favour one of them.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.figures import Outcome, Table, median
from streammeta.cli.local_cluster import start_child

THIS = "this tree"


class BaselineError(Exception):
    """The earlier commit could not be had, or one of the two could not be measured."""


def unpack(root: Path, revision: str, target: Path) -> str:
    """Unpack `revision` of the checkout at `root` into `target`; return its full name.

    Writes nothing to the checkout.
    """
    named = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if named.returncode != 0:
        raise BaselineError(f"--baseline: {revision!r} names no commit of {root}")
    commit = named.stdout.strip()
    target.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", str(root), "archive", commit], capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    if _product_path(target):
        shutil.rmtree(target / "scripts" / "benchmarks", ignore_errors=True)
        shutil.copytree(root / "scripts" / "benchmarks", target / "scripts" / "benchmarks")
    return commit


def _product_path(tree: Path) -> list[str]:
    """Return the folders of `tree` that hold a part of the package `streammeta`.

    Empty for commits from before there was that package: they are measured with their own scripts.
    """
    return sorted(str(part.parent) for part in tree.glob("*/streammeta"))


async def compare(
    trees: Mapping[str, Path],
    arguments: Sequence[str],
    rounds: int,
    logs: Path,
    progress: Callable[[str], None],
) -> Outcome:
    """Measure both of `trees`, named by what they are, `rounds` times each."""
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    for number in range(rounds):
        names = list(trees)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            progress(f"round {number + 1} of {rounds}: {name}")
            figures = await _measure(trees[name], arguments, logs / f"{name}-{number}.log")
            for figure, value in figures.items():
                measured[name].setdefault(figure, []).append(value)
    return _outcome(measured, arguments, rounds)


def module_of(tree: Path, module: str, python: str = sys.executable) -> list[str]:
    """Return the words that run a module of these scripts with the product of `tree`."""
    path = os.pathsep.join([str(tree), *_product_path(tree)])
    return ["env", f"--chdir={tree}", f"PYTHONPATH={path}", python, "-m", module]


async def _measure(tree: Path, arguments: Sequence[str], log: Path) -> dict[str, float]:
    command = module_of(tree, "scripts.benchmarks.main")
    child = start_child(f"benchmark of {tree}", [*command, *arguments, "--format", "json"], log)
    try:
        said, _ = await asyncio.to_thread(child.process.communicate)
    finally:
        await asyncio.to_thread(child.stop)
    try:
        result: dict[str, Any] = json.loads(said)
    except ValueError:
        raise BaselineError(f"{child.name} said no JSON; its log:\n{child.log_tail()}") from None
    if not result["ok"]:
        raise BaselineError(f"{child.name} failed: {result['error']}")
    return {
        figure: value
        for benchmark in result["benchmarks"]
        for figure, value in benchmark["figures"].items()
    }


def _outcome(
    measured: Mapping[str, Mapping[str, Sequence[float]]], arguments: Sequence[str], rounds: int
) -> Outcome:
    this, earlier = measured.values()
    ratios = {
        figure: median(this[figure]) / median(earlier[figure])
        for figure in this
        if figure in earlier and median(earlier[figure]) > 0
    }
    names = tuple(measured)
    return Outcome(
        benchmark="comparison",
        settings={"arguments": list(arguments), "rounds": rounds, "trees": list(names)},
        figures={figure: round(ratio, 3) for figure, ratio in ratios.items()},
        details={"values": measured},
        tables=(
            Table(
                title=f"{' '.join(arguments)}: medians of {rounds} rounds each",
                columns=("figure", *names, "ratio"),
                rows=tuple(
                    (
                        figure,
                        round(median(this[figure]), 4),
                        round(median(earlier[figure]), 4),
                        f"{ratio:.2f}",
                    )
                    for figure, ratio in ratios.items()
                ),
            ),
        ),
    )
