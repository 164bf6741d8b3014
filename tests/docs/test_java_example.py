"""Java in the documentation is code of the examples that `./scripts/java` compiles and runs."""

from __future__ import annotations

import textwrap

import pytest

from tests.docs.code_blocks import ROOT, Block, blocks

EXAMPLES = [
    path.read_text() for path in (ROOT / "clients/java/streammeta-example/src/main").rglob("*.java")
]


@pytest.mark.parametrize("block", [b for b in blocks() if b.language == "java"], ids=str)
def test_java_blocks_are_parts_of_the_examples(block: Block) -> None:
    lines = textwrap.indent(block.text.strip("\n"), 8 * " ", lambda line: bool(line.strip()))
    assert any(lines in example for example in EXAMPLES)
