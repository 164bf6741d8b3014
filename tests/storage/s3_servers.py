"""S3 servers for tests: each context manager starts one on a free local port and ends it after.

Data lives in the memory of the server and is gone with it. Neither server checks secrets. For
Ceph see `s3_ceph`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from streammeta.storage.object_store.address import S3Config
from streammeta.storage.object_store.retry import RetryPolicy
from streammeta.storage.object_store.s3_client import open_client

START_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """A running server and credentials that it takes."""

    url: str
    access_key: str = "test"
    secret_key: str = "test"
    region: str = "us-east-1"

    def create_bucket(self, bucket: str) -> None:
        """Create an empty bucket."""
        client = open_client(S3Config.from_uri(self.uri(bucket)), RetryPolicy())
        client.create_bucket(Bucket=bucket)
        client.close()

    def uri(self, bucket: str) -> str:
        """Give the address of a bucket, as `open_object_store` and --s3-bucket take it."""
        return (
            f"s3://{bucket}?endpoint={quote(self.url, safe='')}&region={self.region}"
            f"&pathStyle=true&accessKey={self.access_key}&secretKey={self.secret_key}"
        )


@contextmanager
def running_ministack() -> Iterator[S3Endpoint]:
    """Run ministack's S3 in a process of its own."""
    with TemporaryDirectory(prefix="ministack-") as folder:
        port = free_port()
        environment = {
            **os.environ,
            "BIND_HOST": "127.0.0.1",
            "SERVICES": "s3",
            "GATEWAY_PORT": str(port),
        }
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ministack"],
                env=environment,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_answering(url, process, log_path)
            yield S3Endpoint(url)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)


@contextmanager
def running_moto() -> Iterator[S3Endpoint]:
    """Run moto's S3 in a thread of this process."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Endpoint(f"http://{host}:{port}")
    finally:
        server.stop()


def free_port() -> int:
    """Give a local port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_answering(url: str) -> bool:
    """Whether there is an answer, if a refusal."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _wait_until_answering(url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        if is_answering(url):
            return
        time.sleep(0.05)
    raise RuntimeError(
        f"ministack did not answer at {url} (exit code {process.poll()}):\n{log_path.read_text()}"
    )
