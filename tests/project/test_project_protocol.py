"""The table of status reasons in docs/protocol.md is the code's: no reason without its row."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from streammeta.controller.quorum.messages import QuorumError
from streammeta.controller.rpc.calls import error_mapping
from streammeta.controller.runtime.quorum_errors import VoterChangeError
from streammeta.v1.common_pb2 import ErrorCode

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
CONTROLLER = ROOT / "controller" / "streammeta" / "controller"

Row: TypeAlias = tuple[str, str, frozenset[str]]
"""Status code, reason, keys of the metadata."""


def documented() -> list[Row]:
    rows = re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \| (.*?) ?\|", PAGE, re.MULTILINE)
    return [(code, reason, frozenset(re.findall(r"`(\w+)`", keys))) for code, reason, keys in rows]


def written() -> Iterator[Row]:
    """Yield what `error_mapping` answers with."""
    for code, reason, names in error_mapping.STATUSES.values():
        yield code.name, reason, frozenset(names.split())
    yield from voter_changes()


def voter_changes() -> Iterator[Row]:
    """The refusals of a change of the voters, which take their reason from the quorum's error."""
    sources = [
        CONTROLLER / "quorum" / "membership.py",
        CONTROLLER / "runtime" / "replication" / "operations.py",
    ]
    named = {
        node.attr
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("QuorumError")
    }
    for name in named - {"NONE", "NOT_LEADER"}:
        code, reason, metadata = error_mapping.classify(VoterChangeError(QuorumError[name], ""))
        yield code.name, reason, frozenset(metadata)


def test_every_reason_has_its_row_and_every_row_its_reason() -> None:
    rows = documented()
    assert len(rows) == len(set(rows)), "a row twice"
    assert set(rows) == set(written())


def test_reasons_are_given_where_handlers_fail_and_where_the_server_refuses() -> None:
    makers = [
        str(path.relative_to(ROOT))
        for path in CONTROLLER.rglob("*.py")
        if re.search(r"details_trailer\(|context\.abort\(", path.read_text())
    ]
    assert sorted(makers) == [
        "controller/streammeta/controller/grpc_server/refusals.py",
        "controller/streammeta/controller/rpc/calls/error_mapping.py",
    ]


def test_verdicts_on_the_page_are_codes_of_the_contract() -> None:
    table = PAGE[PAGE.index("| verdict of the repeat") : PAGE.index("A repeat is compared")]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    codes = {code for line in rows for code in re.findall(r"`([A-Z_]+)`", line.split("|")[1])}
    assert len(codes) >= 8
    assert codes <= {name.removeprefix("ERROR_CODE_") for name, _ in ErrorCode.items()}
