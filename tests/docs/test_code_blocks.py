"""Every code block of README and docs is in the table and sound; Java is from the examples."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import re
import subprocess
import textwrap
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml

from streammeta.cli.local.dev_command import PORT_COUNT
from streammeta.cli.root import cli
from tests.docs.block_kinds import Drawn, Kind, Parsed, Ran, RanBy
from tests.docs.code_blocks import (
    GENERATED,
    ROOT,
    Block,
    blocks,
    commands,
    entries_of_pages,
    find_entries,
    streammeta_commands,
)

ENTRIES = entries_of_pages()
EXAMPLES = [b for b in blocks() if b.page == GENERATED and b.text.startswith("Example")]


def of_kind(*kinds: type[Kind]) -> list[Block]:
    """Return the blocks of some kinds."""
    return [block for block, kind in ENTRIES.kinds.items() if isinstance(kind, kinds)]


def test_every_block_has_an_entry_and_every_entry_a_block() -> None:
    assert not ENTRIES.problems, "\n".join(ENTRIES.problems)


def test_a_block_without_an_entry_and_an_entry_without_a_block_are_noticed() -> None:
    first, second = Block("a.md", 1, "sh", "ls -l"), Block("a.md", 9, "sh", "ls  -l\npwd")
    one: dict[str, Kind] = {"ls -l": Drawn("")}
    both: dict[str, Kind] = {**one, "ls -l (2)": Parsed("")}
    assert find_entries([first], {"a.md": one}).problems == []
    assert find_entries([first, second], {"a.md": both}).kinds[second] == Parsed("")
    (problem,) = find_entries([first, second], {"a.md": one}).problems
    assert problem.startswith("a.md:9 has no entry in block_table.py; say how it is tested: 'ls -l")
    (problem,) = find_entries([first], {"a.md": both}).problems
    assert problem == "block_table.py: no block of a.md begins with 'ls -l (2)'"


@pytest.mark.parametrize("block", of_kind(Ran, RanBy, Parsed), ids=str)
def test_a_block_is_sound_by_itself(block: Block) -> None:
    """Python compiles and its imports exist; commands have the options that they are given."""
    if block.language == "python":
        check_python(block)
    elif block.language == "java":
        pass  # test_java_example.py compares it with a compiled file
    elif block.language == "go":
        assert isinstance(ENTRIES.kinds[block], RanBy), "only the test that runs it compiles it"
    elif block.language == "json":
        json.loads(block.text)
    elif block.text.startswith(("[", "default =")):
        tomllib.loads(block.text)
    elif block.text.startswith("scrape_configs:"):
        yaml.safe_load(block.text)
    elif block.text.startswith("15 3 * * *"):
        check_shell(replace(block, text=block.text.removeprefix("15 3 * * *").replace("\\%", "%")))
    else:
        check_shell(block)


def check_python(block: Block) -> None:
    """Compile a block, and look up all that it imports of this product."""
    tree = compile(
        block.text, str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streammeta"):
            module = importlib.import_module(node.module or "")
            missing = [name.name for name in node.names if not _has(module, name.name)]
            assert not missing, f"{node.module} has no {missing}"


def _has(module: ModuleType, name: str) -> bool:
    """Whether a module has a name, perhaps that of a submodule which is not imported yet."""
    return hasattr(module, name) or find_spec(f"{module.__name__}.{name}") is not None


def check_shell(block: Block) -> None:
    """Check the syntax, the files that are named and the words of every command."""
    shell = block.text.replace(" ...", " -etc-")
    done = subprocess.run(["bash", "-n"], input=shell, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in re.findall(r"(?:^|[ ./])((?:scripts|deploy|docker)/[\w./-]+)", block.text):
        assert (ROOT / path).exists(), path
    for line in commands(block.text):
        for words in streammeta_commands(line):
            check_words(words)


def check_words(words: list[str]) -> None:
    """Parse a command as it is written; one that leaves words out (...) by its options alone."""
    command: click.Command = cli
    rest = list(words)
    with contextlib.ExitStack() as contexts:
        context: click.Context | None = None
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            parent = contexts.enter_context(click.Context(command, context, command.name))
            found = command.get_command(parent, rest[0])
            if found is None:
                break  # a group with a command of its own, such as `compact`
            command, context = found, parent
            del rest[0]
        if "..." in rest:
            known = {name for parameter in command.params for name in parameter.opts}
            used = {word.partition("=")[0] for word in rest if word.startswith("--")}
            assert used <= known, f"{' '.join(words)}: no option {sorted(used - known)}"
        else:
            parse(command, [re.sub(r"\$(CONNECT|ENDPOINT)", "h:1", word) for word in rest], context)


def parse(command: click.Command, words: list[str], parent: click.Context | None) -> None:
    """Parse the words of a command; files that they name need not exist here."""
    try:
        with contextlib.suppress(click.exceptions.Exit):
            command.make_context(command.name, words, parent)
    except click.UsageError as error:
        if not re.search("does not exist|No such file", str(error)):
            raise


@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_examples_of_the_help_are_valid_command_lines(block: Block) -> None:
    check_shell(Block(block.page, block.line, "sh", block.text.partition("\n")[2]))


@pytest.mark.parametrize("block", of_kind(RanBy), ids=str)
def test_the_test_that_runs_a_block_exists(block: Block) -> None:
    kind = ENTRIES.kinds[block]
    assert isinstance(kind, RanBy)
    path, _, name = kind.test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_a_local_cluster_leaves_the_other_ports_of_its_block_free() -> None:
    seen = 0
    for block in blocks():
        found = re.search(r"\bdev --port (\d+)", block.text)
        if found is None:
            continue
        seen += 1
        own = range(int(found[1]), int(found[1]) + PORT_COUNT)
        listens = [int(port) for port in re.findall(r"-listen \S+:(\d+)", block.text)]
        if re.search(r"streammeta kafka (?!.*--listen )", block.text):
            listens.append(9092)  # by default
        assert not set(own) & set(listens), f"{block}: dev takes {own[0]} to {own[-1]}"
    assert seen >= 4


def test_a_reason_is_given_and_files_it_names_exist() -> None:
    reasons = [kind.reason for kind in ENTRIES.kinds.values() if isinstance(kind, Parsed)]
    assert all(len(reason) > 10 for reason in reasons)
    for path in re.findall(r"tests/\w+", " ".join(reasons)):
        assert Path(ROOT / path).is_dir(), path


JAVA_EXAMPLES = [
    path.read_text() for path in (ROOT / "clients/java/streammeta-example/src/main").rglob("*.java")
]


@pytest.mark.parametrize("block", [b for b in blocks() if b.language == "java"], ids=str)
def test_java_blocks_are_parts_of_the_examples(block: Block) -> None:
    lines = textwrap.indent(block.text.strip("\n"), 8 * " ", lambda line: bool(line.strip()))
    assert any(lines in example for example in JAVA_EXAMPLES)
