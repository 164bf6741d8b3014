"""Users of a broker: the file, the check of a password, and the requests that come before it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.protocol.wire import MalformedRequestError, Request, read_request
from streammeta.brokers.kafka.service import authentication
from streammeta.brokers.kafka.service import authentication as module
from streammeta.brokers.kafka.service.users import (
    PASSWORD_MAX,
    PasswordHash,
    Users,
    UsersFileError,
    parse_users,
    user_entry,
)
from tests.kit.kafka_wire import request_bytes

_ALICE = user_entry("alice", "wonder land: é")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "users"
    found.write_text(f"# users\n\n{_ALICE}\n", "utf-8")
    return found


def _replace(path: Path, text: str) -> None:
    """Replace a file as an administrator's tool does: at once, by another one."""
    other = path.with_suffix(".new")
    other.write_text(text, "utf-8")
    os.replace(other, path)  # noqa: PTH105 - one call that replaces


def _remove(path: Path) -> None:
    path.unlink()


async def test_password_is_that_of_its_user_alone(path: Path) -> None:
    users = Users(path)
    for _ in range(2):  # the second time it is known
        assert await users.verify_password("alice", "wonder land: é")
        assert not await users.verify_password("alice", "wonder land: e")
        assert not await users.verify_password("alice", "")
        assert not await users.verify_password("bob", "wonder land: é")


async def test_file_counts_as_it_is_now(path: Path) -> None:
    users = Users(path)
    assert await users.verify_password("alice", "wonder land: é")
    _replace(path, user_entry("alice", "another") + "\n" + user_entry("bob", "builder"))
    assert not await users.verify_password("alice", "wonder land: é")
    assert await users.verify_password("alice", "another")
    assert await users.verify_password("bob", "builder")
    _replace(path, user_entry("bob", "builder"))
    assert not await users.verify_password("alice", "another")


async def test_file_that_can_not_be_read_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    users = Users(path)
    for is_gone in (False, True):
        if is_gone:
            _remove(path)
        else:
            _replace(path, "alice:plain-secret")
        with caplog.at_level(logging.WARNING):
            assert await users.verify_password("alice", "wonder land: é")
    assert "line 1" in caplog.text
    assert "plain-secret" not in caplog.text


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("alice", "NAME:HASH"),
        (":x", "NAME:HASH"),
        ("alice:secret", "scrypt hash"),
        (_ALICE.replace("scrypt$16384", "scrypt$16385"), "bounds"),
        ("alice:scrypt$secret$8$1$secret$secret", "scrypt hash"),
        (_ALICE.replace("$16384$", "$536870912$"), "bounds"),
        (_ALICE[:-6], "base64"),
        (_ALICE.rpartition("$")[0] + "$c2hvcnQ=", "length"),
        (f"{_ALICE}\n{_ALICE}", "already in use"),
    ],
    # Salts differ from one process to the next, and names of tests must not.
    ids=[
        "no hash",
        "no name",
        "no scrypt",
        "cost of no power of two",
        "cost of no number",
        "cost too high",
        "cut hash",
        "short hash",
        "twice",
    ],
)
def test_line_that_is_no_user_is_named_and_not_shown(line: str, problem: str) -> None:
    with pytest.raises(UsersFileError, match=problem) as found:
        parse_users(f"# comment\n{line}\n")
    assert f"line {1 + len(line.splitlines()) if 'already' in problem else 2}" in str(found.value)
    assert "secret" not in str(found.value)


def test_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsersFileError, match="absent"):
        Users(tmp_path / "absent")


def test_hashes_of_one_password_differ_and_do_not_show_it() -> None:
    first, second = (PasswordHash.of(b"secret") for _ in range(2))
    assert first.encode() != second.encode()
    assert first.matches(b"secret")
    assert PasswordHash.decode(first.encode()) == first
    assert "secret" not in repr(first) + first.encode()


@pytest.mark.parametrize(
    ("name", "password"),
    [("", "x"), ("a:b", "x"), (" a", "x"), ("#a", "x"), ("a\nb", "x"), ("a", ""), ("a", "x\0y")],
)
def test_entry_is_refused_that_could_not_be_used(name: str, password: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        user_entry(name, password)


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (b"\0alice\0pw", ("alice", "pw")),
        (b"alice\0alice\0pw", ("alice", "pw")),
        (b"bob\0alice\0pw", None),
        (b"alice\0pw", None),
        (b"\0alice\0p\0w", None),
        (b"\0\0pw", None),
        (b"\0alice\0", None),
        (b"\0\xff\0pw", None),
        (b"\0alice\0" + b"x" * (PASSWORD_MAX + 1), None),
        (b"", None),
    ],
)
def test_message_of_plain_has_a_name_and_a_password(
    token: bytes, expected: tuple[str, str] | None
) -> None:
    assert authentication.read_plain(token) == expected


def _request(api_key: int, version: int, **tree: Any) -> Request:
    return read_request(request_bytes(api_key, version, tree))


def _handshake(mechanism: str = "PLAIN", version: int = 1) -> Request:
    return _request(17, version, mechanism=mechanism)


def _token(password: str) -> Request:
    return _request(36, 1, auth_bytes=b"\0alice\0" + password.encode())


async def test_connection_authenticates_by_handshake_and_password(path: Path) -> None:
    one = authentication.Authentication(Users(path))
    assert (await one.answer(_request(18, 0)))["error_code"] is Code.NONE
    shaken = await one.answer(_handshake())
    assert shaken == {"error_code": Code.NONE, "mechanisms": ("PLAIN",)}
    assert one.user is None
    assert (await one.answer(_token("wonder land: é")))["error_code"] is Code.NONE
    assert one.user == "alice"


async def test_wrong_password_is_answered_late_and_ends_the_connection(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAILURE_DELAY_S", 0.02)
    one = authentication.Authentication(Users(path))
    await one.answer(_handshake())
    began = asyncio.get_running_loop().time()
    with pytest.raises(authentication.AuthenticationFailedError) as found:
        await one.answer(_token("guessed"))
    assert asyncio.get_running_loop().time() - began >= 0.02
    assert found.value.answer is not None
    assert found.value.answer["error_code"] is Code.SASL_AUTHENTICATION_FAILED
    assert one.user is None
    assert "guessed" not in str(found.value) + repr(found.value.__context__)


async def test_other_mechanism_is_told_which_there_is(path: Path) -> None:
    one = authentication.Authentication(Users(path))
    with pytest.raises(authentication.AuthenticationFailedError) as found:
        await one.answer(_handshake("SCRAM-SHA-256"))
    assert found.value.answer == {
        "error_code": Code.UNSUPPORTED_SASL_MECHANISM,
        "mechanisms": ("PLAIN",),
    }


async def test_nothing_else_is_served_before(path: Path) -> None:
    metadata = _request(16, 0)
    one = authentication.Authentication(Users(path))
    for early in (metadata, _token("wonder land: é")):
        with pytest.raises(MalformedRequestError):
            await one.answer(early)
    await one.answer(_handshake())
    for early in (metadata, _handshake(), _request(18, 0)):
        with pytest.raises(MalformedRequestError):
            await one.answer(early)
    assert one.user is None


async def test_old_handshake_is_followed_by_bare_tokens(path: Path) -> None:
    one = authentication.Authentication(Users(path))
    await one.answer(_handshake(version=0))
    assert one.expects_bare_token
    await one.verify_token(b"\0alice\0" + "wonder land: é".encode())
    assert one.user == "alice"


async def test_guesses_are_hashed_a_few_at_a_time_and_hold_up_no_known_client(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = Users(path)
    assert await users.verify_password("alice", "wonder land: é")
    under_way: list[int] = [0]
    most: list[int] = [0]
    begun, release = asyncio.Event(), asyncio.Event()

    async def hashed(*_: object) -> bool:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        begun.set()
        await release.wait()
        under_way[0] -= 1
        return False

    monkeypatch.setattr(asyncio, "to_thread", hashed)
    guesses = [
        asyncio.create_task(users.verify_password("alice", f"guess {at}")) for at in range(20)
    ]
    await begun.wait()
    assert await users.verify_password("alice", "wonder land: é")
    release.set()
    assert not any(await asyncio.gather(*guesses))
    assert most[0] == 2


def test_remembered_password_is_no_attribute_in_the_clear(path: Path) -> None:
    users = Users(path)
    asyncio.run(users.verify_password("alice", "wonder land: é"))
    assert "wonder" not in repr(vars(users))
    assert all(field.name != "password" for field in dataclasses.fields(PasswordHash))
