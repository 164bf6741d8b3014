"""The contract keeps buf's rules and stays compatible with the one that was last released."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streammeta.rpc.contract import SERVICES

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
BASELINE = PROTO / "baseline.binpb"
ADVICE = (
    "a released broker would misread the contract; take the change back, or grow the contract as"
    " docs/protocol.md says under 'How the contract grows'"
)


def buf(*words: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("buf")
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


def breaking(folder: Path) -> subprocess.CompletedProcess[str]:
    return buf("breaking", str(folder), "--against", str(BASELINE))


def changed(folder: Path, file: str, before: str, after: str) -> Path:
    """Return a copy of the contract with one text replaced."""
    copy = folder / "proto"
    shutil.copytree(PROTO, copy, ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
    path = copy / "streammeta" / "v1" / file
    text = path.read_text()
    assert text.count(before) == 1, f"{before!r} is not in {file} exactly once"
    path.write_text(text.replace(before, after))
    return copy


def test_the_contract_keeps_the_rules() -> None:
    found = buf("lint", str(PROTO))
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_contract_is_compatible_with_the_released_one() -> None:
    found = breaking(PROTO)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}{ADVICE}"


def test_every_service_of_the_contract_is_listed() -> None:
    written = [
        name
        for path in sorted(PROTO.glob("streammeta/v1/*.proto"))
        for name in re.findall(r"^service (\w+)", path.read_text(), re.MULTILINE)
    ]
    assert sorted(SERVICES) == sorted(written)


def test_every_rpc_says_whether_to_retry_which_errors_and_which_roles() -> None:
    silent = []
    for path in sorted(PROTO.glob("streammeta/v1/*.proto")):
        for comment, name in re.findall(
            r"((?:^  //.*\n)*)^  rpc (\w+)", path.read_text(), re.MULTILINE
        ):
            parts = re.findall(r"^  // (Retry|Errors|Roles): ", comment, re.MULTILINE)
            if parts != ["Retry", "Errors", "Roles"]:
                silent.append(f"{path.name}: {name}")
    assert not silent


def test_java_has_one_package_and_outer_classes_without_clashes() -> None:
    texts = {path.stem: path.read_text() for path in PROTO.glob("streammeta/v1/*.proto")}
    outer_classes = {name: f"{name.capitalize()}Proto" for name in texts}
    types = re.findall(r"^(?:message|enum|service) (\w+)", "".join(texts.values()), re.MULTILINE)
    assert not set(types) & set(outer_classes.values())
    for name, text in texts.items():
        assert re.findall(r"^option java_(\w+) = (.*);", text, re.MULTILINE) == [
            ("multiple_files", "true"),
            ("outer_classname", f'"{outer_classes[name]}"'),
            ("package", '"io.streammeta.v1"'),
        ]


FIELD = "int64 ttl_ms = 4; "
OPTIONAL = "optional int64 end_offset = 3;    // fast close"
BROKEN = [
    ("objects.proto", FIELD, "int64 ttl_ms = 5; ", "number of a field"),
    ("objects.proto", FIELD, "int32 ttl_ms = 4; ", "type of a field"),
    ("objects.proto", FIELD, "sint64 ttl_ms = 4; ", "encoding of a field"),
    ("objects.proto", FIELD, "repeated int64 ttl_ms = 4; ", "label of a field"),
    ("objects.proto", FIELD, "int64 lifetime_ms = 4; ", "name of a field, which JSON carries"),
    ("streams.proto", OPTIONAL, OPTIONAL.removeprefix("optional "), "presence of a field"),
    ("kv.proto", "  bool overwrite = 4; ", "  // ", "removal of a field without reserve"),
    ("nodes.proto", "NODE_STATE_FENCED = 2; ", "NODE_STATE_FENCED = 9; ", "number of a value"),
    ("nodes.proto", "  NODE_STATE_FENCED = 2; ", "  // ", "removal of a value"),
    ("common.proto", "reserved -1, 501, 507;", "reserved -1, 501;", "a reserved number let go"),
    ("kv.proto", "  rpc DeleteKVs(DeleteKVsRequest) returns (DeleteKVsResponse);", "", "an RPC"),
    (
        "kv.proto",
        "rpc DeleteKVs(DeleteKVsRequest) returns (DeleteKVsResponse);",
        "rpc DeleteKVs(DeleteKVsRequest) returns (stream DeleteKVsResponse);",
        "an answer that becomes a stream",
    ),
    ("kv.proto", "package streammeta.v1;", "package streammeta.v2;", "package"),
    ("records.proto", "    StreamsDeletedRecord streams_deleted = 7; ", "    // ", "record's kind"),
]
NEW_RPC = """message CopyKVsRequest {}
message CopyKVsResponse {}
service KVService {
  rpc CopyKVs(CopyKVsRequest) returns (CopyKVsResponse);"""
GROWN = [
    ("objects.proto", FIELD, "optional int64 new = 9;\n  " + FIELD, "a new field"),
    ("kv.proto", "  bool overwrite = 4; ", '  reserved 4;\n  reserved "overwrite"; ', "reserved"),
    (
        "nodes.proto",
        "NODE_STATE_FENCED = 2; ",
        "NODE_STATE_NEW = 9;\n  NODE_STATE_FENCED = 2; ",
        "value",
    ),
    ("kv.proto", "service KVService {", NEW_RPC, "a new RPC"),
]


@pytest.mark.parametrize(
    ("file", "before", "after", "is_compatible"),
    [
        pytest.param(*change, is_compatible, id=what)
        for changes, is_compatible in ((BROKEN, False), (GROWN, True))
        for *change, what in changes
    ],
)
def test_the_contract_may_grow_and_an_incompatible_change_is_found(
    file: str, before: str, after: str, is_compatible: bool, tmp_path: Path
) -> None:
    found = breaking(changed(tmp_path, file, before, after))
    said = found.stdout + found.stderr
    assert (found.returncode == 0) == is_compatible, said
    assert is_compatible or file.removesuffix(".proto") in said
