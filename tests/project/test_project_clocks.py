"""Every use of a wall clock is in the table of docs/operations/run.md, with its bound."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("proto", "storage", "reconcile", "controller", "broker_client", "brokers", "commands")
_TABLE = _ROOT / "docs" / "operations" / "run.md"

_READS = {"time", "time_ns", "now", "utcnow", "today", "CLOCK_REALTIME"}
"""Names of `time`, `datetime` and `date` that read a wall clock, whatever their arguments."""

_READS_BY_DEFAULT = {"gmtime": 0, "localtime": 0, "ctime": 0, "strftime": 1, "asctime": 0}
"""Functions of `time` that read it unless they are given a moment at this place."""

_OWNERS = {"time", "datetime", "date"}
_OWN = {"wall_ms"}
"""The product's own methods that read it."""

_MAY_READ = re.compile(r"\b(import time|from time|time\.|datetime|date\.|wall_ms)")
"""Found in every module that reads a wall clock; parsing the others takes long."""


def find_reads(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the places of a module that read a wall clock, or hand on a function that does."""
    imported = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
    }
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in imported:
            name = imported[node.id]
        elif isinstance(node, ast.Attribute) and node.attr in _OWN:
            yield node
            continue
        elif isinstance(node, ast.Attribute) and _owner(node) in _OWNERS:
            name = node.attr
        else:
            continue
        call = calls.get(id(node))
        place = _READS_BY_DEFAULT.get(name)
        is_given = call is not None and place is not None and len(call.args) > place
        if name in _READS or (place is not None and not is_given):
            yield node


def _owner(node: ast.Attribute) -> str:
    value = node.value
    return value.id if isinstance(value, ast.Name) else getattr(value, "attr", "")


def modules_that_read() -> set[str]:
    """Return the modules of the product that read a wall clock, with their folders."""
    found = set()
    for part in _PARTS:
        for path in sorted((_ROOT / part / "streammeta").rglob("*.py")):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            text = path.read_text(encoding="utf-8")
            if not _MAY_READ.search(text):
                continue
            if next(find_reads(ast.parse(text)), None) is not None:
                found.add(path.relative_to(_ROOT / part / "streammeta").as_posix())
    return found


def rows() -> list[list[str]]:
    """Return the cells of the table's rows."""
    text = _TABLE.read_text(encoding="utf-8")
    (section,) = re.findall(r"\n### Wall clocks\n(.*?)(?=\n##|\Z)", text, re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_module_that_reads_a_wall_clock_is_in_the_table_and_no_other() -> None:
    named = [module for row in rows() for module in re.findall(r"`([\w/]+\.py)`", row[3])]
    assert set(named) == modules_that_read()


def test_every_use_names_its_purpose_its_clock_and_its_bound() -> None:
    assert len(rows()) > 10
    assert all(len(row) == 4 and all(row) for row in rows())


def test_each_way_to_read_a_wall_clock_is_found() -> None:
    for line in (
        "time.time()",
        "time.time_ns()",
        "datetime.now(UTC)",
        "datetime.datetime.utcnow()",
        "datetime.date.today()",
        "time.gmtime()",
        "time.strftime('%Y')",
        "from time import time_ns as n\nn()",
        "self._clock.wall_ms()",
        "Lease(clock=time.time)",
        "time.clock_gettime(time.CLOCK_REALTIME)",
    ):
        assert list(find_reads(ast.parse(line))), line
    for line in (
        "time.monotonic()",
        "time.clock_gettime(time.CLOCK_BOOTTIME)",
        "time.gmtime(0)",
        "time.strftime('%Y', moment)",
        "datetime.fromtimestamp(1)",
        "index.now()",
    ):
        assert not list(find_reads(ast.parse(line))), line
