"""Texts that others wrote: deep ones and endless numbers end with an error, everywhere."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.config_file import _read
from streammeta.cli.framework.profiles import ProfileError, read_profiles
from streammeta.controller.trust.audit.check import parse
from streammeta.controller.trust.tokens import KeysError, parse_keys
from streammeta.reconcile.listing.inventory import parse_manifest
from streammeta.reconcile.vocabulary.errors import InventoryError
from streammeta.storage.cluster_files.reconcile_runs import RunsError
from streammeta.storage.cluster_files.reconcile_runs import decode as decode_runs
from streammeta.storage.errors import CorruptObjectError, PayloadError
from streammeta.storage.inspection.meta_stream import _decode_json
from streammeta.storage.json_files import decode
from streammeta.storage.parsing import DEPTH_MAX, DocumentError, parse_json, parse_toml
from tests.kit.product import sources

OWN = {
    "storage/streammeta/storage/parsing.py",
    "storage/streammeta/storage/installation.py",  # of this very installation
    "controller/streammeta/controller/metadata/decisions/named_objects.py",  # its own text
    "controller/streammeta/controller/quorum/messages.py",  # control entries of the log
}
"""Modules that parse by themselves, and whose text."""

DEEP = "[" * 100_000
SOME = "[" * 200 + "]" * 200
LONG = "1" * 5_000


@pytest.mark.parametrize("text", [DEEP, SOME, LONG, '{"a":' * 100 + "1" + "}" * 100, "", "\\"])
def test_json_that_can_not_be_used_is_an_error(text: str) -> None:
    for read in (parse_json, lambda raw: parse_json(raw.encode())):
        with pytest.raises(DocumentError):
            read(text)
    with pytest.raises(LookupError):
        parse_json(text, LookupError)


@pytest.mark.parametrize(
    "text", ["x=" + DEEP, "x=" + SOME, "x=" + LONG, ".".join("a" * 999) + "=1", "="]
)
def test_toml_that_can_not_be_used_is_an_error(text: str) -> None:
    with pytest.raises(DocumentError):
        parse_toml(text)


def test_what_is_as_deep_as_may_be_is_read() -> None:
    for depth, is_read in ((DEPTH_MAX, True), (DEPTH_MAX + 1, False)):
        text = "[" * depth + "]" * depth
        if is_read:
            assert json.dumps(parse_json(text)) == text
        else:
            with pytest.raises(DocumentError, match="64"):
                parse_json(text)
    assert parse_toml("a = [1, {b = 2}]") == {"a": [1, {"b": 2}]}


@pytest.mark.parametrize("text", [DEEP, SOME, LONG])
def test_files_of_others_are_refused_by_those_who_read_them(text: str, tmp_path: Path) -> None:
    raw, file = text.encode(), tmp_path / "a.toml"
    file.write_text(f"x = {text}")
    readers: tuple[tuple[type[Exception], Callable[[], Any]], ...] = (
        (KeysError, lambda: parse_keys(raw, "jwks.json")),
        (InventoryError, lambda: parse_manifest(raw, "s3://b", "b")),
        (PayloadError, lambda: _decode_json(raw, 0)),
        (CorruptObjectError, lambda: decode(int, "key", raw)),
        (RunsError, lambda: decode_runs(raw)),
        (ProfileError, lambda: read_profiles(file)),
        (Exception, lambda: _read(file, {})),
    )
    for error, read in readers:
        with pytest.raises(error) as raised:
            read()
        assert not isinstance(raised.value, RecursionError)
    assert parse(raw) is None


def test_no_other_module_parses_by_itself() -> None:
    parsers = re.compile(r"\bjson\.loads?\(|\btomllib\.loads?\(|\byaml\.")
    found = {path for path, text in sources() if parsers.search(text)}
    assert found <= OWN | {"storage/streammeta/storage/parsing.py"}, "call parse_json or parse_toml"
