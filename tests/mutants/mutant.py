"""What a mutant is: a known bug, re-created by a small edit of the product's source.

Edits are texts, so that they say exactly what is wrong, and so that one that no longer fits the
code is noticed instead of doing nothing. Knows nothing of how mutants are run.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `old`, which stands exactly once in the source of `module`, by `new`.

    A text that begins with a line break is a block of whole lines, indented as it may be.
    """

    module: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """Return the edited source; raises ValueError if `old` does not stand there once."""
        if self.old.startswith("\n"):
            return self._apply_to_lines(source)
        self._check(source.count(self.old))
        return source.replace(self.old, self.new)

    def _apply_to_lines(self, source: str) -> str:
        lines, wanted = source.splitlines(), _block(self.old)
        ends = range(len(wanted), len(lines) + 1)
        found = [end for end in ends if _block("\n".join(lines[end - len(wanted) : end])) == wanted]
        self._check(len(found))
        start = found[0] - len(wanted)
        indent = lines[start].removesuffix(wanted[0])
        lines[start : found[0]] = [indent + line for line in _block(self.new)]
        return "\n".join(lines) + "\n"

    def _check(self, count: int) -> None:
        if count != 1:
            raise ValueError(
                f"{self.module}: found {count} times, wanted once; adapt the mutant to the code:\n"
                f"{self.old}"
            )


def _block(text: str) -> list[str]:
    """Return the lines of a block as if its first were not indented."""
    return textwrap.dedent(text).strip("\n").splitlines()


@dataclass(frozen=True, slots=True)
class Simulated:
    """Caught by the simulator: some seed of these, in this weather, must fail."""

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
