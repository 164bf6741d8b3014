"""Rules for the whole tree that no linter knows."""

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.lifecycle.broker_sessions import NodeState
from streammeta.controller.metadata.tables import values
from streammeta.v1 import common_pb2, nodes_pb2, objects_pb2

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {".git", ".venv", ".java", ".tools", "__pycache__", "build", "dist", "target"}
FILE_LINES_MAX = 500
LONG_FILES = ROOT / "tests" / "project" / "long_files.txt"
FUNCTION_LINES_MAX = 70

# Written in halves, or this file would offend.
MACHINE_PATHS = ("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/")
REGISTRIES = (
    *("pypi" + ".org", "python" + "hosted.org", "registry.npm" + "js.org"),
    *("repo1.ma" + "ven.org", "proxy.gol" + "ang.org", "deb.deb" + "ian.org", "crates" + ".io"),
)


def is_ours(path: Path) -> bool:
    """Whether a file is part of the project, not installed, cached or built."""
    parts = path.relative_to(ROOT).parts
    return not any(
        part in NOT_OURS or part.endswith((".egg-info", "_cache")) or part == ".hypothesis"
        for part in parts
    )


def walk() -> Iterator[Path]:
    """Every file of the project; folders that are not ours are not even entered."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if is_ours(Path(folder, name))]
        yield from (Path(folder, name) for name in files if is_ours(Path(folder, name)))


FILES = sorted(walk())
SCRIPTS = [
    path
    for path in FILES
    if path.parent in (ROOT / "scripts", ROOT / ".ci") and os.access(path, os.X_OK)
]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(path: Path) -> str:
    """The text of a file, empty if it has none."""
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


def is_python(path: Path) -> bool:
    """Whether a file is Python that people wrote."""
    if "_pb2" in path.name:
        return False
    if path.suffix:
        return path.suffix == ".py"
    return read(path).startswith("#!/usr/bin/env python3")


PYTHON = [path for path in FILES if is_python(path)]


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(read(path)))


def test_the_tree_was_found() -> None:
    assert ROOT / "pyproject.toml" in FILES
    assert ROOT / "scripts" / "size" in PYTHON
    assert len(PYTHON) > 50


@pytest.mark.parametrize("words", [MACHINE_PATHS, REGISTRIES], ids=["paths", "registries"])
def test_no_file_names_a_machine_path_or_a_registry(words: tuple[str, ...]) -> None:
    found = [
        f"{name_of(path)}:{number}: {word}"
        for path in FILES
        for number, line in enumerate(read(path).splitlines(), start=1)
        for word in words
        if word in line
    ]

    assert found == []


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_script_explains_itself(script: Path) -> None:
    result = subprocess.run(
        [script, "--help"], capture_output=True, text=True, timeout=110, check=False, cwd="/"
    )

    assert result.returncode == 0, result.stderr
    assert "usage" in result.stdout.lower()


def relative_links() -> Iterator[tuple[Path, str]]:
    """Every link in a Markdown file that is not an address or an anchor of the same file."""
    for path in FILES:
        if path.suffix == ".md":
            text = re.sub(r"^```.*?^```", "", read(path), flags=re.M | re.S)
            for target in re.findall(r"\]\(([^)\s]+)\)", text):
                if not re.match(r"[a-z]+:|#", target):
                    yield path, target


def test_relative_links_in_documents_lead_somewhere() -> None:
    broken = [
        f"{name_of(path)}: {target}"
        for path, target in relative_links()
        if not (path.parent / target.partition("#")[0]).exists()
    ]

    assert broken == []


def uncommented_fields(path: Path) -> Iterator[str]:
    """Fields and enum values of a .proto file with a comment neither behind nor above them."""
    previous = ""
    for number, line in enumerate(read(path).splitlines(), start=1):
        declares = re.search(r"\w+ *= *-?\d+ *(\[.*\])?;", line.partition("//")[0])
        if declares and "//" not in line and not previous.strip().startswith("//"):
            yield f"{name_of(path)}:{number}: {line.strip()}"
        previous = line


def test_every_field_of_the_contract_has_a_comment() -> None:
    bare = [
        field
        for path in sorted(ROOT.glob("proto/streammeta/v1/*.proto"))
        for field in uncommented_fields(path)
    ]

    assert bare == []


def test_enums_have_the_numbers_of_the_contract() -> None:
    for enum, pb, prefix in (
        (ErrorCode, common_pb2.ErrorCode, "ERROR_CODE_"),
        (values.ObjectState, common_pb2.ObjectState, "OBJECT_STATE_"),
        (values.StreamState, common_pb2.StreamState, "STREAM_STATE_"),
        (values.OnConflict, common_pb2.OnConflict, "ON_CONFLICT_"),
        (values.SourceOperation, objects_pb2.SourceOperation, "SOURCE_OPERATION_"),
        (NodeState, nodes_pb2.NodeState, "NODE_STATE_"),
    ):
        unspecified = {f"{prefix}UNSPECIFIED": 0} if 0 not in list(enum) else {}
        own = {f"{prefix}{value.name}": value.value for value in enum}
        assert dict(pb.items()) == own | unspecified


def compare_lengths(recorded: dict[str, int], lengths: dict[str, int]) -> list[str]:
    """Return the changes that files and the table of long files need, one sentence each.

    A file may have `FILE_LINES_MAX` lines, or its recorded number, which only decreases.
    """
    long = {name: length for name, length in lengths.items() if length > FILE_LINES_MAX}
    limits = {name: recorded.get(name, FILE_LINES_MAX) for name in long}
    grown = [
        f"split {name}: {length} lines, its limit is {limits[name]}"
        for name, length in sorted(long.items())
        if length > limits[name]
    ]
    shrunk = [
        f"write `{long[name]} {name}`, which has shrunk from {length} lines"
        if name in long
        else f"remove `{length} {name}`, which is no longer above {FILE_LINES_MAX} lines"
        for name, length in sorted(recorded.items())
        if long.get(name, 0) < length
    ]
    return grown + shrunk


def test_no_python_file_grows_beyond_the_limit_or_its_recorded_length() -> None:
    rows = (line.split(maxsplit=1) for line in read(LONG_FILES).splitlines())
    recorded = {name: int(length) for length, name in rows}
    lengths = {name_of(path): len(read(path).splitlines()) for path in PYTHON}

    assert compare_lengths(recorded, lengths) == [], f"see {name_of(LONG_FILES)}"


@pytest.mark.parametrize(
    ("length", "first_word"), [(501, "split"), (551, "split"), (549, "write"), (500, "remove")]
)
def test_a_file_that_grows_or_shrinks_is_named(length: int, first_word: str) -> None:
    recorded = {} if length == 501 else {"a.py": 550}
    (change,) = compare_lengths(recorded, {"a.py": length})

    assert change.split()[0] == first_word
    assert compare_lengths({"a.py": 550}, {"a.py": 550, "b.py": 500}) == []


def long_functions(path: Path) -> Iterator[str]:
    """Functions of a file over the limit, their docstring counted too."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{name_of(path)}:{node.lineno}: {node.name} has {length} lines"


def may_have_a_long_function(path: Path) -> bool:
    """Whether some function is followed by so many lines without another definition."""
    lines = read(path).splitlines()
    for number, line in enumerate(lines):
        if found := re.match(r"( *)(?:async )?def ", line):
            ends = re.compile(rf" {{0,{len(found[1])}}}(?:async def |def |class |@)")
            rest = lines[number + 1 : number + FUNCTION_LINES_MAX]
            if len(rest) == FUNCTION_LINES_MAX - 1 and not any(map(ends.match, rest)):
                return True
    return False


def test_no_function_is_longer_than_the_limit() -> None:
    candidates = filter(may_have_a_long_function, PYTHON)
    too_long = [function for path in candidates for function in long_functions(path)]

    assert too_long == [], f"split functions of more than {FUNCTION_LINES_MAX} lines"


def test_ports_and_channels_are_opened_by_the_factory_of_connections_alone() -> None:
    """Ports by a method of a server, which no ban of a name finds."""
    openers = {
        name_of(path)
        for path in PYTHON
        if re.search("secure_(port|channel)", read(path))
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and re.fullmatch("add_(in)?secure_port|(in)?secure_channel", node.attr)
    }
    collector = "tests/kit/traces.py"  # of OTLP, which is no service of ours
    threads = "tests/kit/grpc_servers.py"  # of stand-ins; the product has no server of threads
    assert openers == {"proto/streammeta/rpc/connections.py", collector, threads}
