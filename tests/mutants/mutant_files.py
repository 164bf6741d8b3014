"""Reader of the catalogue's text files.

A file contains the mutants of one area. Lines that begin with `#` are comments. Files of tests that
several mutants name get a short name first:

    # Mutants of elections.
    VOTES = tests/quorum/test_quorum_votes.py

    == vote-kept-in-memory
    bug: A voter answers before its vote is on disk, and votes again after a crash.
    seen: Raft libraries that leave the order to their users
    caught by: VOTES::test_a_vote_is_flushed_before_its_answer
    @ streammeta.controller.quorum.election
      if granted:
    -     self._flush_vote()
    +     pass
      return granted

Lines of a diff begin with two characters: `- ` is removed, `+ ` is added, and two spaces keep the
line. Removed and kept lines follow each other in the module exactly once, however far indented. A
second `@ module` edits another module. The simulator catches a mutant with some seed of a profile:

    caught by: simulator crashy 0:40

The word `rare` after the seeds leaves a mutant that takes tens of seeds to `./scripts/mutants`.
"""

import re
from collections import deque
from pathlib import Path
from typing import NoReturn

from tests.mutants.mutant import Edit, Mutant, Simulated, Tested

_ALIAS = re.compile(r"([A-Z][A-Z0-9_]*) = (tests/[\w/]+\.py)")
_NAME = re.compile(r"== ([a-z0-9]+(?:-[a-z0-9]+)*)")
_BUG = re.compile(r"bug: (.+\.)")
_SEEN = re.compile(r"seen: (.*[^.])")
_CAUGHT_BY = re.compile(
    r"caught by: (?:simulator (\w+) (\d+):(\d+)( rare)?"
    r"|(tests/[\w/]+\.py|[A-Z][A-Z0-9_]*)(::test_\w+(?:\[.+\])?))"
)
_MODULE = re.compile(r"@ (streammeta(?:\.\w+)+)")
_DIFF_LINE = re.compile(r"([-+ ] .*|[-+]|)")


class MutantFileError(Exception):
    """A line that has another form than expected; the text names the file and the line."""


def read_mutants(folder: Path) -> dict[str, Mutant]:
    """Return the mutants of all files of a folder by name; raises MutantFileError."""
    mutants: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.mutants")):
        for mutant in parse_mutants(path.read_text(encoding="utf-8"), path.name):
            if mutants.setdefault(mutant.name, mutant) is not mutant:
                raise MutantFileError(f"{path.name}: two mutants have the name {mutant.name}")
    return mutants


def parse_mutants(text: str, file: str) -> list[Mutant]:
    """Return the mutants of one file in its order; raises MutantFileError."""
    lines = _Lines(text, file)
    lines.skip_blank_ones()
    aliases: dict[str, str] = {}
    while (alias := lines.accept(_ALIAS)) is not None:
        aliases[alias[1]] = alias[2]
    lines.skip_blank_ones()
    mutants = []
    while lines.are_left:
        mutants.append(_parse_mutant(lines, aliases))
    return mutants


def _parse_mutant(lines: "_Lines", aliases: dict[str, str]) -> Mutant:
    name = lines.expect(_NAME, "'== name-of-a-mutant', '@ module' or a line of a diff")
    bug = lines.expect(_BUG, "'bug: A sentence.'")
    seen = lines.expect(_SEEN, "'seen: ' and where, without a full stop")
    caught_by = _parse_caught_by(lines, aliases)
    edits = [_parse_edit(lines, lines.expect(_MODULE, "'@ streammeta.some.module'"))]
    while (module := lines.accept(_MODULE)) is not None:
        edits.append(_parse_edit(lines, module))
    return Mutant(name[1], bug[1], seen[1], tuple(edits), caught_by)


def _parse_caught_by(lines: "_Lines", aliases: dict[str, str]) -> Simulated | Tested:
    profile, start, stop, rare, file, test = lines.expect(
        _CAUGHT_BY, "'caught by: FILE::test_name' or 'caught by: simulator PROFILE FROM:TO'"
    ).groups()
    if profile is not None:
        return Simulated(profile, range(int(start), int(stop)), is_rare=rare is not None)
    if not file.startswith("tests/") and file not in aliases:
        lines.fail(f"a short name from the top of the file: {', '.join(aliases) or 'it has none'}")
    return Tested(aliases.get(file, file) + test)


def _parse_edit(lines: "_Lines", module: re.Match[str]) -> Edit:
    diff: list[str] = []
    while (line := lines.accept(_DIFF_LINE)) is not None:
        diff.append(line[0])
    while diff and not diff[-1]:
        diff.pop()
    if not any(line.startswith(("-", "+")) for line in diff):
        lines.fail("a line of a diff that begins with '- ' or '+ '")
    return Edit(module[1], tuple(diff))


class _Lines:
    """The lines of a file that are not comments, read once from the first to the last."""

    def __init__(self, text: str, file: str) -> None:
        numbered = enumerate(text.splitlines(), start=1)
        self._left = deque((number, line) for number, line in numbered if line[:1] != "#")
        self._file = file
        self._compared = (0, "")

    @property
    def are_left(self) -> bool:
        """Whether there is a line to read."""
        return bool(self._left)

    def skip_blank_ones(self) -> None:
        """Go on to the next line that is not blank."""
        while self._left and not self._left[0][1]:
            self._left.popleft()

    def accept(self, form: re.Pattern[str]) -> re.Match[str] | None:
        """Read the next line if it has this form."""
        if not self._left:
            return None
        self._compared = self._left[0]
        found = form.fullmatch(self._compared[1])
        if found is not None:
            self._left.popleft()
        return found

    def expect(self, form: re.Pattern[str], description: str) -> re.Match[str]:
        """Read the next line, which must have this form."""
        found = self.accept(form)
        if found is None:
            self.fail(description)
        return found

    def fail(self, expected: str) -> NoReturn:
        """Raise an error at the line that was compared last."""
        number, line = self._compared
        raise MutantFileError(f"{self._file}:{number}: expected {expected}, found {line!r}")
