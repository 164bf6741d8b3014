"""Certificates of the listener for Kafka clients may be replaced while it listens."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from cryptography import x509

from streammeta.brokers.kafka.service import process as module
from streammeta.brokers.kafka.service.process import KafkaListener
from streammeta.tls.files import TlsFiles
from tests.kit.certificates import Authority


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.01)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "old")


@pytest.fixture
def placed(tmp_path: Path, authority: Authority) -> TlsFiles:
    files = TlsFiles(tmp_path / "ca", tmp_path / "cert", tmp_path / "key")
    _place(files, authority.issue("broker/1"))
    return files


def _place(files: TlsFiles, given: TlsFiles) -> None:
    for at, source in ((files.ca, given.ca), (files.certificate, given.certificate)):
        shutil.copy(source, at)
    shutil.copy(given.key, files.key)


@asynccontextmanager
async def _listening(files: TlsFiles, *, is_mutual: bool = True) -> AsyncIterator[int]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    listener = KafkaListener(echo, files, is_mutual=is_mutual)
    port = await listener.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await listener.close()


_REFUSED = (ssl.SSLError, ConnectionError)


class Client:
    """A connection; `certificate` is what it was shown."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)

    async def echo(self, data: bytes) -> bytes:
        self.writer.write(data)
        return await self.reader.read(100)

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


async def _connect(port: int, files: TlsFiles, *, shows_one: bool = True) -> Client:
    """Connect, trusting the authority of some files. Raises `_REFUSED`."""
    context = ssl.create_default_context(cafile=str(files.ca))
    if shows_one:
        context.load_cert_chain(files.certificate, files.key)
    client = Client(*await asyncio.open_connection("127.0.0.1", port, ssl=context))
    try:
        if await client.echo(b"hello") != b"hello":
            raise ConnectionResetError
    except _REFUSED:
        with suppress(*_REFUSED):
            await client.close()
        raise
    return client


async def _connected(port: int, files: TlsFiles, *, shows_one: bool = True) -> Client:
    """Connect as soon as the listener's certificate is one of the authority of some files."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await _connect(port, files, shows_one=shows_one)
            except _REFUSED:
                await asyncio.sleep(0.01)


async def test_later_connections_get_the_replaced_certificate_and_its_authorities(
    tmp_path: Path, authority: Authority, placed: TlsFiles
) -> None:
    newer = Authority(tmp_path, "new")
    old_client, new_client = authority.issue("broker/7"), newer.issue("broker/7")
    async with _listening(placed) as port:
        before = await _connect(port, old_client)
        with pytest.raises(_REFUSED):
            await _connect(port, new_client)
        _place(placed, newer.issue("broker/1"))
        after = await _connected(port, new_client)
        assert after.certificate != before.certificate
        with pytest.raises(_REFUSED):
            await _connect(port, old_client)
        with pytest.raises(_REFUSED):  # a client that the listener would not know
            await _connect(port, TlsFiles(newer.ca, old_client.certificate, old_client.key))
        assert await before.echo(b"still here") == b"still here"
        await before.close()
        await after.close()


async def test_clients_with_passwords_need_no_certificate_after_a_replacement_either(
    tmp_path: Path, authority: Authority, placed: TlsFiles
) -> None:
    newer = Authority(tmp_path, "new")
    async with _listening(placed, is_mutual=False) as port:
        await (await _connect(port, authority.issue("broker/7"), shows_one=False)).close()
        _place(placed, newer.issue("broker/1"))
        await (await _connected(port, newer.issue("broker/7"), shows_one=False)).close()


async def test_files_of_no_use_stay_out_and_are_told_of_once(
    authority: Authority, placed: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    client = authority.issue("broker/7")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]

    async with _listening(placed) as port, asyncio.timeout(60):
        placed.certificate.write_text("no certificate")
        while not told():
            await _shown(port, client)
        old = await _shown(port, client)
        _place(placed, authority.issue("broker/1", serial=1))
        while await _shown(port, client) == old:
            pass
    assert len(told()) == 1
    assert "listen-tls-cert" in told()[0]


async def _shown(port: int, files: TlsFiles) -> object:
    """Return the certificate that a connection is shown."""
    client = await _connect(port, files)
    await client.close()
    return client.certificate


async def test_the_end_of_the_certificate_is_known(placed: TlsFiles) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    shown = x509.load_pem_x509_certificate(placed.certificate.read_bytes())
    listener = KafkaListener(serve, placed)
    assert listener.certificate_ends_s == shown.not_valid_after_utc.timestamp()
    assert KafkaListener(serve, None).certificate_ends_s is None
