"""Clients that authenticate by SASL/PLAIN: stock ones over TLS, and those that are kept out."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest

from scripts.benchmarks.peers.apache_kafka import class_path, missing
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.service import server as module
from streammeta.brokers.kafka.service.server import KafkaServer
from streammeta.brokers.kafka.service.users import Users, parse_users, user_entry
from streammeta.cli.local.local_cluster import start_child, tls_words
from tests.kit.certificates import Authority
from tests.kit.kafka_brokers import CLIENTS, KafkaBrokers, client_in_go, result_of, running_brokers
from tests.kit.kafka_wire import WireClient, framed, request_bytes
from tests.kit.real_cluster import streammeta
from tests.kit.tools import needs, program

pytestmark = pytest.mark.process

_SECRET, _WRONG = "open sesame", "open barley"
_HANDSHAKE, _AUTHENTICATE, _LIST_GROUPS = (17, 1), (36, 1), (16, 0)


class Guarded:
    """A broker with users."""

    def __init__(self, brokers: KafkaBrokers, root: Path, *options: str) -> None:
        self.users = root / "users"
        self.users.write_text(user_entry("alice", _SECRET))
        self.address = brokers.start(1, "--users", str(self.users), *options)
        self.brokers = brokers

    def log(self) -> str:
        """Return what the broker has logged."""
        return self.brokers.children[1].log_path.read_text()


@contextmanager
def _guarded(root: Path, *options: str) -> Iterator[Guarded]:
    with running_brokers(root) as brokers:
        yield Guarded(brokers, root, *options)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "clients")


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Guarded]:
    own = tls_words(authority.issue("broker/1"), "listen-tls")
    with _guarded(tmp_path_factory.mktemp("tls"), *own) as guarded:
        yield guarded


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with _guarded(tmp_path_factory.mktemp("plain")) as guarded:
        yield guarded


@pytest.mark.parametrize("client", ["confluent", "kafka_python", "aiokafka"])
def test_stock_client_is_let_in_by_its_password_over_tls(
    over_tls: Guarded, authority: Authority, client: str
) -> None:
    def run(password: str) -> Any:
        words = (client, over_tls.address, str(authority.ca), "alice", password)
        return result_of(over_tls.brokers.run("sasl_script.py", *words))

    assert run(_SECRET) == {"left": 0, "read": ["value"]}
    assert run(_WRONG) == {"error": "SASL_AUTHENTICATION_FAILED"}
    assert _SECRET not in over_tls.log()
    assert _WRONG not in over_tls.log()


@pytest.mark.skipif(bool(missing()), reason=missing() or "it is there")
def test_java_client_is_let_in_by_its_password_over_tls(
    over_tls: Guarded, authority: Authority, tmp_path: Path
) -> None:
    source = str(CLIENTS / "SaslScript.java")
    compiler = ("javac", "-cp", class_path(), "-d", str(tmp_path), source)
    subprocess.run(compiler, check=True, capture_output=True)

    def run(password: str) -> Any:
        machine = ("java", "-XX:TieredStopAtLevel=1", "-cp", f"{class_path()}:{tmp_path}")
        words = (over_tls.address, str(authority.ca), "alice", password)
        return result_of(start_child("java", [*machine, "SaslScript", *words], tmp_path / "log"))

    assert run(_SECRET) == {"left": 0, "read": ["value"]}
    assert run(_WRONG) == {"error": "SaslAuthenticationException"}


def test_client_in_go_is_let_in_by_its_password_over_tls(
    over_tls: Guarded, authority: Authority, tmp_path: Path
) -> None:
    program_in_go = client_in_go()

    def run(password: str) -> Any:
        words = ("sasl", over_tls.address, str(authority.ca), "alice", password)
        return result_of(start_child("go", [program_in_go, *words], tmp_path / "log"))

    assert run(_SECRET) == {"left": 0, "read": ["value"]}
    assert run(_WRONG) == {"error": "SASL_AUTHENTICATION_FAILED"}


@needs("kcat", "kafkacat")
def test_kcat_is_let_in_by_its_password_over_tls(over_tls: Guarded, authority: Authority) -> None:
    def run(password: str, *words: str) -> subprocess.CompletedProcess[bytes]:
        settings = {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(authority.ca),
            "sasl.mechanism": "PLAIN",
            "sasl.username": "alice",
            "sasl.password": password,
        }
        said = [word for name, value in settings.items() for word in ("-X", f"{name}={value}")]
        command = [program("kcat", "kafkacat") or "", "-b", over_tls.address, *said, *words]
        return subprocess.run(command, input=b"value", capture_output=True, timeout=60, check=False)

    produced = run(_SECRET, "-P", "-t", "sasl-kcat")
    assert produced.returncode == 0, produced.stderr
    assert run(_SECRET, "-C", "-t", "sasl-kcat", "-c", "1").stdout == b"value\n"
    refused = run(_WRONG, "-L")
    assert refused.returncode != 0
    assert b"Invalid username or password" in refused.stderr


def _authenticated(client: WireClient, password: str) -> Code:
    client.call(*_HANDSHAKE, {"mechanism": "PLAIN"})
    token = b"\0alice\0" + password.encode()
    return Code(client.call(*_AUTHENTICATE, {"auth_bytes": token}).error_code)


def _is_closed(client: WireClient) -> bool:
    try:
        client.call(*_LIST_GROUPS, {})
    except (AssertionError, OSError):
        return True
    return False


def test_nothing_is_served_before_and_everything_after(guarded: Guarded) -> None:
    with WireClient(guarded.address) as client:
        assert _is_closed(client)
    with WireClient(guarded.address) as client:
        assert _authenticated(client, _WRONG) is Code.SASL_AUTHENTICATION_FAILED
        assert _is_closed(client)
    with WireClient(guarded.address) as client:
        refused = client.call(*_HANDSHAKE, {"mechanism": "SCRAM-SHA-512"})
        assert refused.error_code == Code.UNSUPPORTED_SASL_MECHANISM
        assert list(refused.mechanisms) == ["PLAIN"]
        assert _is_closed(client)
    with WireClient(guarded.address) as client:
        assert _authenticated(client, _SECRET) is Code.NONE
        assert not _is_closed(client)
        again = client.call(*_HANDSHAKE, {"mechanism": "PLAIN"})
        assert again.error_code == Code.ILLEGAL_SASL_STATE
        assert not _is_closed(client)


async def test_refused_client_may_read_why_before_its_connection_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "REJECTION_READ_TIMEOUT_S", 300.0)
    users = tmp_path / "users"
    users.write_text(user_entry("alice", _SECRET))
    broker = cast(Broker, None)
    server = KafkaServer(broker, Groups(broker), Users(users))
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
    token = {"auth_bytes": b"\0alice\0" + _WRONG.encode()}
    for call, tree in ((_HANDSHAKE, {"mechanism": "PLAIN"}), (_AUTHENTICATE, token)):
        writer.write(framed(request_bytes(*call, tree)))
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    assert server.connections == 1
    writer.close()
    await asyncio.wait(server._connections)
    assert server.connections == 0
    listener.close()


def test_old_handshake_takes_a_bare_token(guarded: Guarded) -> None:
    host, _, port = guarded.address.rpartition(":")
    for password, answer in ((_SECRET, bytes(4)), (_WRONG, b"")):
        with socket.create_connection((host, int(port)), 30) as connection:
            connection.sendall(framed(request_bytes(17, 0, {"mechanism": "PLAIN"})))
            assert connection.recv(4096)
            connection.sendall(framed(b"\0alice\0" + password.encode()))
            assert connection.recv(4096) == answer


def test_frames_of_strangers_are_small_and_hurt_nobody(guarded: Guarded) -> None:
    host, _, port = guarded.address.rpartition(":")
    token = request_bytes(*_AUTHENTICATE, {"auth_bytes": b"\0alice\0" + _SECRET.encode()})
    hostile = {
        "large": (1 << 20).to_bytes(4, "big") + bytes(1000),
        "huge": b"\x7f\xff\xff\xff",
        "negative": b"\xff\xff\xff\xff",
        "no handshake": framed(token),
        "cut token": framed(token[:-3]),
        "text": framed(f"\0alice\0{_SECRET}".encode()),
        "old groups": framed(request_bytes(*_LIST_GROUPS, {})),
    }
    with WireClient(guarded.address) as honest:
        assert _authenticated(honest, _SECRET) is Code.NONE
        for name, data in hostile.items():
            with socket.create_connection((host, int(port)), 30) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):  # closed before all of it was read
                    assert connection.recv(4096) == b"", name
            assert not _is_closed(honest), name
    assert "sesame" not in guarded.log()


def test_passwords_in_plain_text_are_refused_away_from_loopback(tmp_path: Path) -> None:
    words = ["kafka", "--connect", "127.0.0.1:1", "--store", f"file://{tmp_path}"]
    words += ["--node-id", "1", "--users", str(tmp_path / "users"), "--listen"]
    answer = streammeta(*words, "0.0.0.0:9092")
    assert answer["exit_code"] == 2
    assert "plain text" in answer["error"]["message"]
    began = time.monotonic()
    allowed = streammeta(*words, "0.0.0.0:9092", "--plain-text-passwords")
    assert allowed["exit_code"] == 1
    assert "users" in allowed["error"]["message"]
    assert time.monotonic() - began < 30


def test_entry_is_made_of_a_password_on_standard_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(f"{_SECRET}\nmore\n"))
    made = streammeta("kafka-user", "alice")
    assert made["ok"], made
    assert parse_users(made["entry"])["alice"].matches(_SECRET.encode())
    monkeypatch.setattr("sys.stdin", StringIO("\n"))
    assert streammeta("kafka-user", "alice")["exit_code"] == 2
