"""Tries one mutant in this process, which is of no use for anything else afterwards.

Prints one JSON object: whether it was caught, by which seed or test, and how. `--unchanged` runs
the same seed or test without the edits, which must then pass. Exits with 0 unless the trial itself
could not be made.

Example: python -m tests.mutants.trial vote-kept-in-memory
"""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType

from tests.mutants.mutant import Edit, Mutant, Simulated, Tested

_SLIPS = ("AttributeError", "ImportError", "IndexError", "KeyError", "NameError", "TypeError")
"""What a careless edit leads to; it would be caught by anything, and so proves nothing."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one mutant."""

    name: str
    caught: bool
    seed: int | None
    """The seed that caught it."""
    runs: int
    """Seeds run, or 1 for a test."""
    how: str
    seconds: float


def try_mutant(mutant: Mutant, *, unchanged: bool, seeds: range | None = None) -> Trial:
    """Make the mutant's edits, unless `unchanged`, and run what should catch it."""
    started = time.monotonic()
    if not unchanged:
        install(mutant.edits)
    match mutant.caught_by:
        case Simulated(profile=profile, seeds=own_seeds):
            seed, runs, how = _simulate(profile, own_seeds if seeds is None else seeds)
            caught = seed is not None
        case Tested(test=test):
            seed, runs = None, 1
            caught, how = _test(test)
    return Trial(mutant.name, caught, seed, runs, how, time.monotonic() - started)


def _simulate(profile: str, seeds: range) -> tuple[int | None, int, str]:
    from tests.sim.sim_run import simulate

    for runs, seed in enumerate(seeds, start=1):
        failure = simulate(seed, profile).failure
        if failure is not None:
            if failure.invariant.startswith(_SLIPS):
                raise RuntimeError(f"seed {seed} breaks the code, not a rule: {failure.invariant}")
            return seed, runs, failure.invariant
    return None, len(seeds), f"profile {profile}: nothing found"


def _test(test: str) -> tuple[bool, str]:
    import pytest

    # Plugins that these tests do not need take longer to load than the tests to run.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ["-p", "pytest_timeout", "-p", "pytest_asyncio.plugin"]
    # A test that fails half-way may leave a socket open, which says nothing of the mutant.
    plugins += ["-p", "no:unraisableexception"]
    options = [*plugins, "-q", "-x", "--slow", "--timeout=120", "--no-header"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main([*options, test])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}:\n{output.getvalue()}")
    if slip := re.search(r"^E +(AttributeError|ImportError|NameError).*", output.getvalue(), re.M):
        raise RuntimeError(f"{test} breaks on the code, not on a rule: {slip[0]}")
    return code == pytest.ExitCode.TESTS_FAILED, test


def main() -> int:
    """Run the command line; return the exit code."""
    from tests.mutants.catalogue import MUTANTS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(MUTANTS), metavar="NAME", help="see catalogue/")
    parser.add_argument("--unchanged", action="store_true", help="without the edits")
    parser.add_argument("--seeds", metavar="FROM:TO", help="instead of the mutant's own")
    given = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[2])  # tests are named from there
    # The process that trials are forked from has some modules of the product for itself.
    for name in [name for name in sys.modules if name.partition(".")[0] == "streammeta"]:
        del sys.modules[name]
    seeds = None if given.seeds is None else range(*map(int, given.seeds.split(":")))
    trial = try_mutant(MUTANTS[given.name], unchanged=given.unchanged, seeds=seeds)
    print(json.dumps(asdict(trial)))
    return 0


def install(edits: Iterable[Edit]) -> None:
    """Edit modules as they are imported from now on; they must not be imported yet.

    Raises ValueError if one is, or if an edit does not fit its module.
    """
    by_module: dict[str, list[Edit]] = {}
    for edit in edits:
        by_module.setdefault(edit.module, []).append(edit)
    for module in by_module:
        if module in sys.modules:
            raise ValueError(f"{module} is imported already; edits need a fresh process")
    sys.meta_path.insert(0, _EditingFinder(by_module))
    for module in by_module:
        importlib.import_module(module)


class _EditingLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, edits: Sequence[Edit]) -> None:
        super().__init__(name, path)
        self._edits = edits

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname)
        assert source is not None
        for edit in self._edits:
            source = edit.apply(source)
        code: CodeType = compile(source, self.path, "exec", dont_inherit=True)
        return code


class _EditingFinder(importlib.abc.MetaPathFinder):
    def __init__(self, edits: dict[str, list[Edit]]) -> None:
        self._edits = edits

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._edits:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _EditingLoader(fullname, spec.origin, self._edits[fullname])
        return spec


if __name__ == "__main__":
    sys.exit(main())
