"""Comparison of two commits in one run, in alternating turns.

The earlier commit is unpacked into a directory and measured by its own scripts: modules move, while
commands and the names of figures stay. The order changes from round to round, so that a machine
that becomes busier does not favour one of them.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.benchmarks.figures import BenchmarkError, Outcome, Progress, Table, median
from scripts.benchmarks.processes import read_result, running

THIS = "this tree"


def unpack(root: Path, revision: str, target: Path) -> str:
    """Unpack `revision` of the checkout at `root` into `target`; return its full name.

    Writes nothing to the checkout.
    """
    git = ["git", "-C", str(root)]
    named = subprocess.run(
        [*git, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if named.returncode != 0:
        raise BenchmarkError(f"--baseline: {revision!r} names no commit of {root}")

    commit = named.stdout.strip()
    target.mkdir(parents=True)
    archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    return commit


def command_in(tree: Path, module: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module of a tree's scripts with that tree's product."""
    # An editable install names the folders of this tree, so the other tree's have to come first.
    parts = sorted(str(part.parent) for part in tree.glob("*/streammeta"))
    path = os.pathsep.join([str(tree), *parts])
    return ["env", f"--chdir={tree}", f"PYTHONPATH={path}", python, "-m", module]


async def compare(
    trees: Mapping[str, Path],
    words: Sequence[str],
    rounds: int,
    logs: Path,
    progress: Progress,
) -> Outcome:
    """Run the benchmark that `words` name in both of `trees`, `rounds` times each."""
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    for number in range(rounds):
        for name in list(trees)[:: 1 if number % 2 == 0 else -1]:
            progress(f"round {number + 1} of {rounds}: {name}")
            figures = await _measure(trees[name], words, logs / f"{name}-{number}.log")
            for figure, value in figures.items():
                measured[name].setdefault(figure, []).append(value)
    return _outcome(measured, words, rounds)


async def _measure(tree: Path, words: Sequence[str], log: Path) -> dict[str, float]:
    command = [*command_in(tree, "scripts.benchmarks.main"), *words, "--format", "json"]
    async with running(f"benchmark of {tree}", command, log) as child:
        result = await read_result(child, may_fail=True)
    if not result["ok"]:
        raise BenchmarkError(f"{child.name} failed: {result['error']}")
    return {
        figure: value
        for benchmark in result["benchmarks"]
        for figure, value in benchmark["figures"].items()
    }


def _outcome(
    measured: Mapping[str, Mapping[str, Sequence[float]]], words: Sequence[str], rounds: int
) -> Outcome:
    this, earlier = (
        {figure: median(values) for figure, values in found.items()} for found in measured.values()
    )
    ratios = {
        figure: value / earlier[figure]
        for figure, value in this.items()
        if earlier.get(figure, 0) > 0
    }
    rows = tuple(
        (figure, round(this[figure], 4), round(earlier[figure], 4), f"{ratio:.2f}")
        for figure, ratio in ratios.items()
    )

    return Outcome(
        benchmark="comparison",
        settings={"arguments": list(words), "rounds": rounds, "trees": list(measured)},
        figures={figure: round(ratio, 3) for figure, ratio in ratios.items()},
        details={"values": measured},
        tables=(
            Table(
                title=f"{' '.join(words)}: medians of {rounds} rounds each",
                columns=("figure", *measured, "ratio"),
                rows=rows,
            ),
        ),
    )
