"""The table of status reasons in docs/protocol.md is the code's: no reason without its row."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from streammeta.controller.quorum.messages import QuorumError
from streammeta.controller.rpc.calls import error_mapping
from streammeta.controller.runtime.quorum_errors import VoterChangeError
from streammeta.rpc.failures import Reason
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
    """What the functions of `request_guard` return, read from their source."""
    tree = ast.parse(Path(error_mapping.__file__).read_text())
    for case in (one for one in ast.walk(tree) if isinstance(one, ast.match_case)):
        names = {
            ast.unparse(one.targets[0]): one.value
            for one in case.body
            if isinstance(one, ast.Assign)
        }
        returned = case.body[-1]
        assert isinstance(returned, ast.Return)
        if not isinstance(returned.value, ast.Tuple):
            continue  # None: another function knows it
        code, reason, metadata = returned.value.elts
        if ast.unparse(reason.value if isinstance(reason, ast.Attribute) else reason) != "Reason":
            yield from voter_changes()
            continue
        metadata = names.get(ast.unparse(metadata), metadata)
        assert isinstance(metadata, ast.Dict)
        keys = [ast.literal_eval(key) for key in metadata.keys if key is not None]
        assert isinstance(code, ast.Attribute)
        assert isinstance(reason, ast.Attribute)
        yield code.attr, Reason[reason.attr].value, frozenset(keys)


def voter_changes() -> Iterator[Row]:
    """The refusals of a change of the voters, which take their reason from the quorum's error."""
    sources = [
        CONTROLLER / "quorum" / "membership.py",
        CONTROLLER / "runtime" / "replication" / "operations.py",
    ]
    named = {
        one.attr
        for path in sources
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.Attribute) and ast.unparse(one.value).endswith("QuorumError")
    }
    for name in named - {"NONE", "NOT_LEADER"}:
        code, reason, metadata = error_mapping.classify(VoterChangeError(QuorumError[name], ""))
        yield code.name, reason, frozenset(metadata)


def test_every_reason_has_its_row_and_every_row_its_reason() -> None:
    rows = documented()
    assert len(rows) == len(set(rows)), "a row twice"
    assert set(rows) == set(written())


def test_the_reader_of_the_code_finds_what_it_is_to_find() -> None:
    found = set(written())
    assert found >= {
        ("UNAVAILABLE", "NOT_LEADER", frozenset({"leader_id", "leader_endpoint", "epoch"})),
        ("ALREADY_EXISTS", "DUPLICATE_VOTER", frozenset()),
        ("RESOURCE_EXHAUSTED", "DISK_FULL", frozenset()),
    }
    nodes = list(ast.walk(ast.parse(Path(error_mapping.__file__).read_text())))
    returns = [one for one in nodes if _returns_tuple(one)]
    cases = [one for one in nodes if isinstance(one, ast.match_case)]
    ends = sum(_returns_tuple(one.body[-1]) for one in cases)
    assert len(returns) == ends, "a status that no case of a match returns"


def _returns_tuple(node: ast.AST) -> bool:
    return isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)


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
