"""Command line of the benchmarks: runs the chosen ones in a temporary directory and prints results.

Controllers and clients are children that are stopped, and the directory is removed, however a run
ends.
"""

import asyncio
import inspect
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scripts.benchmarks import baseline, registry
from scripts.benchmarks.figures import BenchmarkError, Outcome, Progress
from scripts.benchmarks.machine import OtherWork, describe_commit, describe_machine
from scripts.benchmarks.registry import Request
from scripts.benchmarks.report import Reporter
from streammeta.cli.local.local_cluster import ChildFailedError
from streammeta.client.errors import BrokerClientError

ROOT = Path(__file__).resolve().parent.parent.parent
EXPECTED_ERRORS = (BenchmarkError, BrokerClientError, ChildFailedError, OSError)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return 0 for success, 1 for failure, 130 if interrupted."""
    request = registry.parse(words)
    # A supervisor's SIGTERM ends a run as cleanly as Ctrl-C. Shells start background commands with
    # SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))

    reporter = Reporter(request.format)
    directory = Path(tempfile.mkdtemp(prefix="streammeta-bench-", dir=request.data_dir))
    try:
        machine, others = describe_machine(directory), OtherWork()
        with reporter.running():
            outcomes = asyncio.run(_measure(request, directory, reporter.progress))
        reporter.results(machine, describe_commit(ROOT), others.cores(), outcomes)
        return 0
    except KeyboardInterrupt:
        reporter.fail("interrupted; all processes are stopped")
        return 130
    except EXPECTED_ERRORS as error:
        reporter.fail(str(error))
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _measure(request: Request, directory: Path, progress: Progress) -> list[Outcome]:
    trees = {baseline.THIS: ROOT}
    if request.baseline is not None:
        commit = baseline.unpack(ROOT, request.baseline, directory / "baseline")
        trees[commit[:12]] = directory / "baseline"
        if not hasattr(registry.module_of(request.name), "measure_trees"):
            words = request.words()
            return [await baseline.compare(trees, words, request.rounds, directory, progress)]

    outcomes: list[Outcome] = []
    for name, settings in request.settings.items():
        (directory / name).mkdir()
        found = await _measure_one(name, directory / name, settings, progress, trees)
        outcomes += [
            replace(outcome, settings=asdict(settings) | {**outcome.settings}) for outcome in found
        ]
    return outcomes


async def _measure_one(
    name: str, place: Path, settings: Any, progress: Progress, trees: Mapping[str, Path]
) -> Sequence[Outcome]:
    """Run one benchmark in the directory `place`, a blocking one in a thread."""
    module = registry.module_of(name)
    if hasattr(module, "measure_trees"):
        found = await module.measure_trees(place, trees, settings, progress)
    elif inspect.iscoroutinefunction(module.measure):
        found = await module.measure(place, settings, progress)
    else:
        found = await asyncio.to_thread(module.measure, place, settings, progress)
    return [found] if isinstance(found, Outcome) else found


if __name__ == "__main__":
    sys.exit(main())
