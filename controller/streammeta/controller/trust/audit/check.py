"""Audit verification: whether lines are the chain that was written, and where not.

Pure: takes lines as bytes. A chain shows every change of what other lines follow. It can't show
that its end was cut off, or its last line changed: compare its last hash with one kept elsewhere,
such as the `audit_chain` events of the controller's log, or with the anchors in the cluster's map.

A controller may write while its files are read. So the file of its log's own name may be empty
right after the one before was full and renamed, or end amid a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streammeta.controller.trust.audit.lines import FORMAT, GENESIS, line_hash
from streammeta.storage.parsing import parse_json

START_CALL = "audit.start"
"""Call of the line with which a process begins."""


@dataclass(frozen=True, slots=True)
class Break:
    """Broken place of a chain: file, line from 1, and problem."""

    file: str
    line: int
    problem: str


@dataclass(slots=True)
class Verified:
    """One controller's chain. `head` is the hash of its last line."""

    node: int
    lines: int = 0
    first_seq: int = 0
    last_seq: int = 0
    head: str = ""
    dropped: int = 0
    """Lines that the controller lost, by its own word."""
    torn: int = 0
    """Lines cut short by the end of a process."""
    breaks: list[Break] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AuditFileLines:
    """Name and lines of a file, without newlines. The last line may be incomplete."""

    name: str
    lines: Sequence[bytes]
    is_unfinished: bool = False


def split(name: str, data: bytes) -> AuditFileLines:
    """Return the lines of a file's bytes."""
    *whole, rest = data.split(b"\n")
    return AuditFileLines(name, [*whole, rest] if rest else whole, is_unfinished=bool(rest))


def parse(line: bytes) -> Mapping[str, Any] | None:
    """Return the members of a line, None if it is none of an audit log."""
    try:
        members = parse_json(line)
    except ValueError:
        return None
    if not isinstance(members, dict) or members.get("v") != FORMAT:
        return None
    seq, prev = members.get("seq"), members.get("prev")
    return members if isinstance(seq, int) and seq > 0 and isinstance(prev, str) else None


def verify(
    files: Iterable[AuditFileLines],
    expected: Mapping[int, str] | None = None,
    anchored: Mapping[int, Mapping[int, str]] | None = None,
) -> list[Verified]:
    """Check the files of controllers, in any order. Return their chains by node.

    `expected` are hashes of a single controller's lines, known from elsewhere, by the line's
    number. `anchored` are such hashes of any controller's lines.
    """
    by_node: dict[int, list[tuple[float, AuditFileLines]]] = {}
    begun: list[AuditFileLines] = []
    for file in files:
        # A file may begin with a torn line, so the first readable line names its owner.
        begins = next(filter(None, map(parse, file.lines)), None)
        if begins is not None:
            by_node.setdefault(begins.get("node", -1), []).append((begins["seq"], file))
        # The controller may have just rotated: this file is new, and its first line is being
        # written.
        elif not file.lines or (len(file.lines) == 1 and file.is_unfinished):
            begun.append(file)
        else:
            by_node.setdefault(-1, []).append((0, file))

    for file in begun:
        _append_begun(by_node, file)

    found = []
    for node, of_node in sorted(by_node.items()):
        ordered = [file for _, file in sorted(of_node, key=lambda one: (one[0], one[1].name))]
        check = _Check(Verified(node), {**(expected or {}), **(anchored or {}).get(node, {})})
        for file in ordered:
            check.file(file)
        check.end()
        # Without a number there is nothing to compare with anchors, which would pass unnoticed.
        if node < 0 and anchored:
            problem = "it holds no whole line, and every anchored log has some"
            check.verified.breaks.append(Break(ordered[0].name, 1, problem))
        found.append(check.verified)

    return found


def _append_begun(
    by_node: dict[int, list[tuple[float, AuditFileLines]]], file: AuditFileLines
) -> None:
    """Move a file without a complete line after the full files of its log, if it is the newest."""
    for of_node in by_node.values():
        if any(name_of_log(other.name) == file.name for _, other in of_node):
            if file.lines:
                # It has no sequence number yet, and it is always the newest.
                of_node.append((float("inf"), file))
            return
    by_node.setdefault(-1, []).append((0, file))


def name_of_log(name: str) -> str | None:
    """Return the name of the log that a full file belongs to, None for any other file."""
    log, dot, number = name.rpartition(".")
    return log if dot and number.isdecimal() else None


class _Check:
    """Walks one chain."""

    def __init__(self, verified: Verified, expected: Mapping[int, str]) -> None:
        self.verified = verified
        self._expected = dict(expected)
        self._before: bytes | None = None
        self._torn: Break | None = None
        self._is_unfinished = False

    def file(self, file: AuditFileLines) -> None:
        """Go through a file's lines."""
        for number, line in enumerate(file.lines, start=1):
            for problem in self._problems(line):
                self._note(file.name, number, problem)
            # The raw bytes, also of a torn line, because the next line names their hash.
            self._before = line
            if parse(line) is None:
                self._torn = Break(file.name, number, "it is not a line of an audit log")
        self._is_unfinished = file.is_unfinished
        if not file.lines:
            self._note(file.name, 1, "the file is empty")

    def end(self) -> None:
        """Note what only the end shows."""
        found = self.verified
        if self._before is not None:
            found.head = line_hash(self._before)
        # The writer may be in the middle of this line, which is not a break.
        if self._torn is not None and self._is_unfinished:
            found.torn += 1
        elif self._torn is not None:
            found.breaks.append(self._torn)
        for seq in sorted(self._expected):
            where = f"{found.first_seq} to {found.last_seq}"
            self._note("", 0, f"line {seq}, known from elsewhere, is not among lines {where}")

    def _problems(self, line: bytes) -> Iterator[str]:
        found, members = self.verified, parse(line)
        found.lines += 1
        if members is None:
            return
        seq, prev = members["seq"], members["prev"]
        self._validate_torn(members)
        yield from self._misplaced(seq, prev)
        if members.get("node", -1) != found.node:
            yield f"it is of controller {members.get('node')}, among lines of {found.node}"
        # Removed when found. The expected lines that remain at the end are missing.
        known = self._expected.pop(seq, None)
        if known is not None and known != line_hash(line):
            yield f"line {seq} is not the one known from elsewhere: it was changed, or those before"
        found.last_seq = seq
        found.dropped += members.get("dropped", 0)

    def _misplaced(self, seq: int, prev: str) -> Iterator[str]:
        """Yield the problems of a line's position after the previous one."""
        found = self.verified
        if self._before is None or not found.first_seq:
            found.first_seq = seq
            # Older files may have been archived, so only line 1 must begin the chain.
            if seq == 1 and prev != GENESIS and self._before is None:
                yield "line 1 names a line before it: it was changed"
            return

        wanted = found.last_seq + 1
        if seq > wanted:
            count = seq - wanted
            yield (
                f"lines {wanted} to {seq - 1} are missing before line {seq}"
                if count > 1
                else f"line {wanted} is missing before line {seq}"
            )
        elif seq < wanted:
            yield f"line {seq} comes after line {found.last_seq}: repeated, moved or started again"
        elif prev != line_hash(self._before):
            yield f"line {seq} does not continue line {seq - 1}: one of the two was changed"

    def _validate_torn(self, members: Mapping[str, Any]) -> None:
        """Note the line before if it can't be read, unless a process ended while writing it."""
        torn, self._torn = self._torn, None
        if torn is None or self._before is None:
            return
        is_start = members.get("call") == START_CALL
        # Only a killed process leaves a torn line, and then the next line is of a new process.
        if is_start and members["prev"] == line_hash(self._before):
            self.verified.torn += 1
        else:
            self.verified.breaks.append(torn)

    def _note(self, file: str, line: int, problem: str) -> None:
        self.verified.breaks.append(Break(file, line, problem))
