"""Known bugs, planted one at a time, are found: the simulator is worth what it finds.

Here every edit must fit the code, and the mutants that the simulator finds within few seeds are
tried. `scripts/mutants` tries them all, and what catches them on the unchanged code too.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.quorum.messages import EpochEnd, FetchRequest
from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Edit, Mutant, Simulated
from tests.mutants.running import run_trial
from tests.mutants.trial import Trial
from tests.quorum.core_harness import Lone, batch

_ROOT = Path(__file__).resolve().parents[2]

_AT_ONCE = 2
_SIMULATED = [
    mutant
    for mutant in MUTANTS.values()
    if isinstance(mutant.caught_by, Simulated) and not mutant.caught_by.is_rare
]
_QUICK = {mutant.edits[0].module.rpartition(".")[0]: mutant for mutant in _SIMULATED}.values()
"""One mutant of each package; the others are slow."""


@pytest.fixture(scope="module")
def trial_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Future[Trial]]]:
    """Return the trial of a mutant; those of all selected tests are made at once."""
    selected = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == "test_a_mutant_is_caught"
        and not item.get_closest_marker("skip")
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        trials = {name: pool.submit(run_trial, name) for name in selected}
        yield trials.__getitem__
        pool.shutdown(cancel_futures=True)


@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("computations")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(mutant.name, marks=() if mutant in _QUICK else pytest.mark.slow)
        for mutant in _SIMULATED
    ],
)
def test_a_mutant_is_caught(name: str, trial_of: Callable[[str], Future[Trial]]) -> None:
    trial = trial_of(name).result()
    assert trial.caught, f"{name}: {MUTANTS[name].bug} Nothing found by {MUTANTS[name].caught_by}"


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_the_edits_fit_the_code(mutant: Mutant) -> None:
    sources: dict[str, str] = {}
    for edit in mutant.edits:
        spec = find_spec(edit.module)
        assert spec is not None
        assert spec.origin is not None
        path = Path(spec.origin)
        source = sources.get(edit.module) or path.read_text(encoding="utf-8")
        sources[edit.module] = edit.apply(source)
    for module, source in sources.items():
        compile(source, module, "exec")


def test_the_tests_that_catch_mutants_exist() -> None:
    for mutant in MUTANTS.values():
        if not isinstance(mutant.caught_by, Simulated):
            file, name = mutant.caught_by.test.split("[")[0].split("::")
            assert f"def {name}(" in Path(_ROOT, file).read_text(encoding="utf-8"), mutant.name


def test_an_edit_replaces_lines_that_stand_there_once() -> None:
    source = "def f():\n    if a:\n        b()\n        c()\n    return b()\n"
    assert Edit("m", ("- if a:", "-     b()", "+ b()")).apply(source) == (
        "def f():\n    b()\n        c()\n    return b()\n"
    )
    assert Edit("m", ("  return b()", "+ d()")).apply(source) == source + "    d()\n"
    for old in (("- b",), ("- absent",), ("- b()", "-     c()"), ("- if a:", "- b()")):
        with pytest.raises(ValueError, match="expected once"):
            Edit("m", old).apply(source)
    with pytest.raises(ValueError, match="found 2 times"):
        Edit("m", ("- b()",)).apply("b()\nb()\n")


def test_an_answer_to_the_life_before_the_restart_is_not_taken() -> None:
    """Request numbers begin anew with each process, so the number alone proves nothing."""
    node = Lone()
    node.begin(1, 4)
    first = node.only(FetchRequest)
    earlier = replace(first, header=replace(first.header, incarnation=first.header.incarnation + 1))
    node.feed(first, batch(0, 4, b"a"))
    node.flush()
    second = node.only(FetchRequest)
    late = replace(earlier, header=replace(earlier.header, request_id=second.header.request_id))
    node.feed(late, diverging=EpochEnd(Epoch(0), EndOffset(0)))
    assert not node.effects
    assert node.core.log.end_offset == 1
