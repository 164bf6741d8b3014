"""A mutant: a known bug, re-created by a small edit of the product's source.

Edits are diffs, so that they say exactly what is wrong, and so that an edit that no longer fits the
code is noticed instead of doing nothing.
"""

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines of `module` to replace: each is marked as one that goes ("- "), comes ("+ ") or stays.

    Those that go or stay follow each other in the source exactly once, however far indented.
    """

    module: str
    lines: tuple[str, ...]

    def apply(self, source: str) -> str:
        """Return the edited source; raises ValueError if the lines do not stand there once."""
        lines, wanted = source.splitlines(), self._without("+")
        starts = range(len(lines) - len(wanted) + 1)
        found = [at for at in starts if _dedented(lines[at : at + len(wanted)]) == wanted]
        if len(found) != 1:
            text = "\n".join(wanted)
            raise ValueError(
                f"{self.module}: found {len(found)} times, expected once; adapt the mutant to the"
                f" code:\n{text}"
            )
        (start,) = found
        indent = lines[start].removesuffix(wanted[0])
        lines[start : start + len(wanted)] = [indent + line for line in self._without("-")]
        return "\n".join(lines) + "\n"

    def _without(self, mark: str) -> list[str]:
        return [line[2:] for line in self.lines if not line.startswith(mark)]


def _dedented(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).splitlines()


@dataclass(frozen=True, slots=True)
class Simulated:
    """Caught by the simulator: some seed of these, in this weather, must fail.

    Where it takes tens of seeds from 0 on they may begin at the first that failed, so that a run of
    all tests need not look for it again.
    """

    profile: str = "swarm"
    seeds: range = range(200)
    is_rare: bool = False
    """Whether it takes tens of seeds, too many for every run of the tests."""

    def __str__(self) -> str:
        return f"profile {self.profile}, seeds {self.seeds.start}:{self.seeds.stop}"


@dataclass(frozen=True, slots=True)
class Tested:
    """Caught by a test, named as for pytest, which must fail."""

    test: str

    def __str__(self) -> str:
        return self.test


@dataclass(frozen=True, slots=True)
class Mutant:
    """A known bug: what is wrong, where such a bug has been seen, and what must catch it."""

    name: str
    bug: str
    seen: str
    edits: tuple[Edit, ...]
    caught_by: Simulated | Tested
