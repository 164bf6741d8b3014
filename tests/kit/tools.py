"""Programs of other projects that tests run: on PATH, or where `scripts/fetch_tools` puts them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

FETCHED = Path(__file__).resolve().parents[2] / ".tools" / "bin"


def program(*names: str) -> str | None:
    """Return the path of the first of these programs that is there."""
    for name in names:
        found = shutil.which(name) or shutil.which(name, path=str(FETCHED))
        if found is not None:
            return found
    return None


def needs(*names: str) -> pytest.MarkDecorator:
    """Return a mark for tests that run one of these programs: without it they are skipped."""
    return pytest.mark.skipif(
        program(*names) is None, reason=f"no {names[0]} on PATH: run ./scripts/fetch_tools"
    )


def path_of(name: str) -> str:
    """Return the path of a program that a test runs behind `needs(name)`."""
    found = program(name)
    assert found is not None, name
    return found
