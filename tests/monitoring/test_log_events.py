"""The catalogue of log events in docs/log-events.md names each event of the code, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from streammeta.controller.monitoring.metrics.metrics import CAUSES
from streammeta.controller.peers import dialled
from streammeta.controller.peers.transport import _MEANT_FOR_ANOTHER

ROOT = Path(__file__).resolve().parents[2]
CONTROLLER = ROOT / "controller" / "streammeta" / "controller"
PAGE = ROOT / "docs" / "log-events.md"

LEVELS = ("debug", "info", "warning", "error", "critical", "exception")

MISMATCHES = {
    *(dialled.FOREIGN_CLUSTER, dialled.ANOTHER_NODE, dialled.ANOTHER_VERSION),
    *(dialled.STRANGER, dialled.REFUSED_CERTIFICATE),
}

CHOSEN = {
    "peers/transport.py: event": {
        *MISMATCHES,
        *_MEANT_FOR_ANOTHER.values(),
        *("peer_refuses_request", "peer_connection_broken"),
    },
    "peers/server.py: f'peer_{event}'": {f"peer_{cause}" for cause in CAUSES["peers"]},
    "monitoring/http/http_listener.py: f'http_{event}'": {
        f"http_{cause}" for cause in CAUSES["http"]
    },
    "tls/manager.py: event": {"certificate_expired", "certificate_expires_soon"},
}
"""Names of events that are not spelt where they are logged, by the place and its expression."""


def logged() -> Iterator[tuple[str, str, str]]:
    """Yield (place and expression, event or "", level) of each call of a structlog logger."""
    for path in sorted(CONTROLLER.rglob("*.py")):
        source = path.read_text()
        if "structlog.get_logger" not in source:
            continue
        tree = ast.parse(source)
        loggers = set(_loggers(tree))
        place = path.relative_to(CONTROLLER).as_posix()
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and (level := _level(call, loggers)):
                event = call.args[0]
                spelt = event.value if isinstance(event, ast.Constant) else ""
                yield f"{place}: {ast.unparse(event)}", str(spelt), level


def _loggers(tree: ast.Module) -> Iterator[str]:
    """Yield names of loggers, and of methods of one that have a name of their own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            of_logger = re.match(r"structlog\.get_logger\(|_?log(ger)?\.\w+\b(?!\()", _text(node))
            if of_logger:
                yield node.targets[0].id


def _text(node: ast.Assign) -> str:
    return ast.unparse(node.value)


def _level(call: ast.Call, loggers: set[str]) -> str:
    of = call.func
    if isinstance(of, ast.Name) and of.id in loggers:
        return "of choice"
    if not isinstance(of, ast.Attribute) or of.attr not in LEVELS:
        return ""
    return of.attr if isinstance(of.value, ast.Name) and of.value.id in loggers else ""


def catalogue() -> dict[str, str]:
    """Return level by event, as the page has them."""
    rows = re.findall(r"^\| `(\w+)` \| ([a-z, ]+) \| \S", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(dict(rows)), "an event stands twice"
    return dict(rows)


def test_each_event_of_the_code_is_in_the_catalogue_and_no_other() -> None:
    found: set[str] = set()
    unknown: set[str] = set()
    used: set[str] = set()
    for place, event, _ in logged():
        if event:
            found.add(event)
        elif place in CHOSEN:
            used.add(place)
            found |= CHOSEN[place]
        else:
            unknown.add(place)
    assert not unknown, f"say in CHOSEN which events these are: {unknown}"
    assert used == CHOSEN.keys()
    assert len(found) > 70
    assert found == catalogue().keys()


def test_levels_of_the_catalogue_are_those_of_the_code() -> None:
    levels = catalogue()
    wrong = {
        f"{event}: {level}"
        for _, event, level in logged()
        if event and level != "of choice" and level != levels[event]
    }
    assert not wrong


def test_events_are_snake_case_and_sorted() -> None:
    events = list(catalogue())
    assert events == sorted(events)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", event) for event in events)
