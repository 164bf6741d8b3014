"""What running scenarios found out, and how it is said: plain lines, the sums last.

Knows nothing of the product. A scenario fails when one of its facts does not hold; deviations are
facts that hold here in another, listed way, and don't make it fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class _Absent:
    """Stands for a fact there is no such field for; equal to nothing else."""

    def __repr__(self) -> str:
        return "no such field"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One fact that does not hold; `field` is its path within the step."""

    field: str
    expected: object
    actual: object


@dataclass(frozen=True, slots=True)
class Failure:
    """A mismatch and where it was met; step 0 is the scenario as a whole."""

    step: int
    op: str
    mismatch: Mismatch


@dataclass(frozen=True, slots=True)
class Deviation:
    """A listed difference that a step met."""

    step: int
    op: str
    rule: str
    reason: str


@dataclass(slots=True)
class ScenarioResult:
    """What one scenario, or one entry of a table, came to.

    `is_counted` False: there was nothing to run, which is neither passed nor failed.
    """

    file: str
    name: str
    is_counted: bool = True
    failures: list[Failure] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)

    @property
    def is_passed(self) -> bool:
        """Whether every fact holds."""
        return not self.failures

    def fail(self, step: int, op: str, mismatches: Sequence[Mismatch]) -> None:
        """Add the facts of a step that don't hold."""
        self.failures.extend(Failure(step, op, mismatch) for mismatch in mismatches)

    def lines(self) -> Iterator[str]:
        """Yield what is to be said: deviations, then failures."""
        for deviation in self.deviations:
            where = f"{self.file} {self.name}, step {deviation.step} ({deviation.op})"
            yield f"deviation: {where}: {deviation.rule}: {deviation.reason}"
        for failure in self.failures:
            where = f"{self.file} {self.name}, step {failure.step} ({failure.op})"
            mismatch = failure.mismatch
            yield (
                f"FAILED {where}: {mismatch.field}: expected {_said(mismatch.expected)}, "
                f"got {_said(mismatch.actual)}"
            )

    def document(self) -> dict[str, Any]:
        """Return the same as JSON can carry it."""
        return {
            "file": self.file,
            "scenario": self.name,
            "passed": self.is_passed if self.is_counted else None,
            "failures": [
                {
                    "step": failure.step,
                    "op": failure.op,
                    "field": failure.mismatch.field,
                    "expected": _said(failure.mismatch.expected),
                    "actual": _said(failure.mismatch.actual),
                }
                for failure in self.failures
            ],
            "deviations": [
                {"step": item.step, "op": item.op, "rule": item.rule, "reason": item.reason}
                for item in self.deviations
            ],
        }


def _said(value: object) -> str:
    text = value if isinstance(value, str) and value else repr(value)
    return " ".join(text.split())


def summary(results: Sequence[ScenarioResult]) -> str:
    """Return the last line."""
    counted = [result for result in results if result.is_counted]
    passed = sum(result.is_passed for result in counted)
    return f"{passed} passed, {len(counted) - passed} failed"


def compare(expected: object, actual: object, path: str) -> Iterator[Mismatch]:
    """Yield what of `expected` does not hold.

    Of a map only the expected keys are looked at, recursively; lists are equal element by element.
    """
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key, value in expected.items():
            yield from compare(value, actual.get(key, ABSENT), f"{path}.{key}")
    elif isinstance(expected, list) and isinstance(actual, list | tuple):
        if len(expected) != len(actual):
            yield Mismatch(path, expected, list(actual))
            return
        for index, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
            yield from compare(wanted, got, f"{path}[{index}]")
    elif expected != actual or isinstance(expected, bool) is not isinstance(actual, bool):
        yield Mismatch(path, expected, actual)
