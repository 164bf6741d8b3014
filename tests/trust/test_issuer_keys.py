"""Keys of an issuer: how they are found, how often they are asked for, and what is not followed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from streammeta.controller.trust import issuer_keys
from streammeta.controller.trust.issuer_keys import IssuerKeys, KeysAddress, KeysFile
from streammeta.controller.trust.tokens import IssuerKey, KeysError
from tests.trust.token_issuer import Issuer, Publisher, publishing

DISCOVERY = "/.well-known/openid-configuration"


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with publishing() as publisher:
        yield publisher


def discoverable(publisher: Publisher, of: Issuer, **replaced: Any) -> None:
    said = {"issuer": publisher.address, "jwks_uri": f"{publisher.address}/jwks", **replaced}
    publisher.answers[DISCOVERY] = (200, json.dumps(said).encode())
    publisher.answers["/jwks"] = (200, of.jwks)


class Taken:
    """The keys as they were last taken."""

    def __init__(self) -> None:
        self.ids: list[list[str]] = []

    def __call__(self, keys: Mapping[str, IssuerKey]) -> None:
        self.ids.append(sorted(keys))


async def read_once(keys: IssuerKeys) -> None:
    await asyncio.wait_for(keys.read_again(), 60)


async def test_keys_are_found_by_the_issuers_own_word(publisher: Publisher) -> None:
    discoverable(publisher, Issuer())
    taken = Taken()
    await read_once(IssuerKeys(KeysAddress(publisher.address), taken))
    assert publisher.asked == [DISCOVERY, "/jwks"]
    assert taken.ids == [["k1"]]


async def test_keys_at_a_known_address_need_no_discovery(publisher: Publisher) -> None:
    publisher.answers["/jwks"] = (200, Issuer().jwks)
    taken = Taken()
    address = KeysAddress("https://login.example.org", f"{publisher.address}/jwks")
    await read_once(IssuerKeys(address, taken))
    assert (publisher.asked, taken.ids) == (["/jwks"], [["k1"]])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"issuer": "https://evil.example.org"}, "names the issuer 'https://evil.example.org'"),
        ({"issuer": None}, "names the issuer None"),
        ({"jwks_uri": "http://evil.example.org/jwks"}, "jwks_uri: .* must begin with https://"),
        ({"jwks_uri": "file:///etc/passwd"}, "jwks_uri: .* must begin with https://"),
        ({"jwks_uri": "http://127.0.0.1@evil.example.org/"}, "must begin with https://"),
        ({"jwks_uri": 7}, "jwks_uri: 7, must begin"),
    ],
)
def test_what_an_issuer_may_not_say_is_refused(
    publisher: Publisher, said: dict[str, Any], why: str
) -> None:
    discoverable(publisher, Issuer(), **said)
    with pytest.raises(KeysError, match=why):
        KeysAddress(publisher.address).read()
    assert publisher.asked == [DISCOVERY]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((500, b""), "can't be fetched: HTTP Error 500"),
        ((302, b""), "can't be fetched: HTTP Error 302"),
        ((200, b"[]"), "must be a JSON object with issuer and jwks_uri"),
        ((200, b"{}"), "must be a JSON object with issuer and jwks_uri"),
        ((200, b"\xff"), "must be a JSON object with issuer and jwks_uri"),
        ((200, b" " * ((1 << 20) + 1)), "answers more than 1048576 bytes"),
    ],
    ids=["failure", "elsewhere", "list", "empty", "bytes", "huge"],
)
def test_answers_that_are_none_are_told(
    publisher: Publisher, answer: tuple[int, bytes], why: str
) -> None:
    publisher.answers[DISCOVERY] = answer
    publisher.headers["location"] = f"{publisher.address}/elsewhere"
    with pytest.raises(KeysError, match=why):
        KeysAddress(publisher.address).read()
    assert publisher.asked == [DISCOVERY], "nothing is followed"


def test_an_issuer_that_answers_slowly_is_left(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "TIMEOUT_S", 0.2)
    publisher.answers["/jwks"] = (200, Issuer().jwks)
    for pause_s, why in ((0.02, "answers too slowly"), (1.0, "can't be fetched: timed out")):
        publisher.pause_s = pause_s
        with pytest.raises(KeysError, match=why):
            KeysAddress("x", f"{publisher.address}/jwks").read()


async def test_a_flood_of_unknown_keys_asks_the_issuer_once(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.answers["/jwks"] = (200, Issuer().jwks)
    keys = IssuerKeys(KeysAddress("x", f"{publisher.address}/jwks"), Taken())
    await asyncio.wait_for(asyncio.gather(*(keys.read_again() for _ in range(500))), 60)
    for _ in range(500):
        await keys.read_again()
    assert publisher.asked == ["/jwks"]
    monkeypatch.setattr(issuer_keys, "READ_AGAIN_S", 0.0)
    await read_once(keys)
    assert publisher.asked == ["/jwks"] * 2


async def test_a_caller_that_leaves_does_not_take_the_answer_from_the_others(
    publisher: Publisher,
) -> None:
    publisher.answers["/jwks"] = (200, Issuer().jwks)
    taken = Taken()
    keys = IssuerKeys(KeysAddress("x", f"{publisher.address}/jwks"), taken)
    first, second = (asyncio.create_task(keys.read_again()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 60)
    assert taken.ids == [["k1"]]


async def test_keys_stay_while_the_issuer_is_out_of_reach_and_that_is_logged_once(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "READ_AGAIN_S", 0.0)
    publisher.answers["/jwks"] = (200, Issuer().jwks)
    taken = Taken()
    keys = IssuerKeys(KeysAddress("x", f"{publisher.address}/jwks"), taken)
    answers = [(200, Issuer().jwks), (500, b""), (500, b""), (200, b'{"keys": []}'), (500, b"")]
    with capture_logs() as logs:
        for answer in answers:
            publisher.answers["/jwks"] = answer
            await read_once(keys)
    assert taken.ids == [["k1"]]
    events = [log["event"] for log in logs]
    assert events == ["token_keys_read", *["token_keys_not_read"] * 3]


async def test_a_defect_in_reading_keys_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> bytes:
        raise RuntimeError("told to fail")

    monkeypatch.setattr(Path, "read_bytes", fail)
    keys = IssuerKeys(KeysFile(Path("jwks.json"), interval_s=3600), Taken())
    with capture_logs() as logs:
        await read_once(keys)
    assert [log["event"] for log in logs] == ["token_keys_not_read"]


async def test_a_file_of_keys_is_read_again_when_it_changes(tmp_path: Path) -> None:
    issuer, file = Issuer(), tmp_path / "jwks.json"
    file.write_bytes(issuer.jwks)
    changed = asyncio.Event()
    taken = Taken()

    def take(keys: Mapping[str, IssuerKey]) -> None:
        taken(keys)
        changed.set()

    source = KeysFile(file, interval_s=0.01)
    keys = IssuerKeys(source, take)
    keys.take(source.read())
    changed.clear()
    running = asyncio.create_task(keys.run())
    issuer.add("k2")
    issuer.remove("k1")
    file.write_bytes(issuer.jwks)
    await asyncio.wait_for(changed.wait(), 60)
    running.cancel()
    assert taken.ids == [["k1"], ["k2"]]


async def test_keys_are_read_at_once_when_that_is_asked_for(tmp_path: Path) -> None:
    issuer, file = Issuer(), tmp_path / "jwks.json"
    file.write_bytes(issuer.jwks)
    read = asyncio.Queue[Mapping[str, IssuerKey]]()
    keys = IssuerKeys(KeysFile(file, interval_s=3600), read.put_nowait)
    running = asyncio.create_task(keys.run())
    assert set(await asyncio.wait_for(read.get(), 60)) == {"k1"}
    issuer.add("k2")
    file.write_bytes(issuer.jwks)
    keys.look_now()
    assert set(await asyncio.wait_for(read.get(), 60)) == {"k1", "k2"}
    running.cancel()


def test_a_file_of_keys_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"jwks.json"):
        KeysFile(tmp_path / "jwks.json", 5).read()
