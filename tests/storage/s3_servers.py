"""S3 servers for tests, Ceph's gateway among them: each on a free local port, ended after.

Data lives in the memory of the server and is gone with it. Neither server checks secrets.

Ceph's gateway lives in one temporary folder with a configuration and keys of its own, listens on
local ports, and ends, by process id, with the context. Needs Ceph's programs (see `scripts/test`).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from streammeta.cli.local.local_cluster import Child, free_ports, start_child
from streammeta.storage.object_store.protocol.address import S3Config
from streammeta.storage.object_store.protocol.retry import RetryPolicy
from streammeta.storage.object_store.s3.s3_client import open_client

START_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """A running server and credentials that it takes."""

    url: str
    access_key: str = "test"
    secret_key: str = "test"
    region: str = "us-east-1"

    def create_bucket(self, bucket: str) -> None:
        client = open_client(S3Config.from_uri(self.uri(bucket)), RetryPolicy())
        client.create_bucket(Bucket=bucket)
        client.close()

    def uri(self, bucket: str) -> str:
        """Give the address of a bucket, as `open_object_store` and --store take it."""
        return (
            f"s3://{bucket}?endpoint={quote(self.url, safe='')}&region={self.region}"
            f"&pathStyle=true&accessKey={self.access_key}&secretKey={self.secret_key}"
        )


@contextmanager
def running_ministack() -> Iterator[S3Endpoint]:
    """Run ministack's S3 in a process of its own."""
    with TemporaryDirectory(prefix="ministack-") as folder:
        (port,) = free_ports(1)
        settings = {"BIND_HOST": "127.0.0.1", "SERVICES": "s3", "GATEWAY_PORT": str(port)}
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ministack"],
                env=os.environ | settings,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_answering(url, process, log_path)
            yield S3Endpoint(url)
        finally:
            process.kill()
            process.wait()


@contextmanager
def running_moto() -> Iterator[S3Endpoint]:
    """Run moto's S3 in a thread of this process."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Endpoint(f"http://{host}:{port}")
    finally:
        server.stop()


def is_answering(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60):
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


ACCESS_KEY = "testing"
SECRET_KEY = "testing123"
START_S = 90.0
STEP_S = 60.0

_CONFIG = """\
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_port_min = {osd_port}
ms_bind_port_max = {osd_port_end}
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
keyring = {folder}/keyring
run_dir = {folder}/run
log_file = {folder}/log/$name.log
admin_socket = {folder}/run/$name.asok
pid_file = {folder}/run/$name.pid
crash_dir = {folder}/run
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
mon_warn_on_pool_no_redundancy = false
[mon]
mon_data = {folder}/mon
mon_initial_members = a
mon_data_avail_crit = 1
[osd]
osd_data = {folder}/osd
keyring = {folder}/osd.keyring
osd_objectstore = memstore
memstore_device_bytes = 2147483648
osd_class_load_list = *
osd_class_default_list = *
[client.rgw.a]
rgw_data = {folder}/rgw
keyring = {folder}/rgw.keyring
rgw_frontends = beast endpoint=127.0.0.1:{rgw_port} tcp_nodelay=1
rgw_run_sync_thread = false
rgw_enable_usage_log = false
"""


@contextmanager
def running_ceph() -> Iterator[S3Endpoint]:
    """Run the gateway and what it needs, with one user; its data is gone with it.

    Raises `RuntimeError` with the end of the logs if it does not start.
    """
    with TemporaryDirectory(prefix="streammeta-ceph-") as folder:
        ceph = _Ceph(Path(folder))
        try:
            ceph.start()
            yield S3Endpoint(ceph.url, ACCESS_KEY, SECRET_KEY)
        finally:
            ceph.stop()


@dataclass
class _Ceph:
    folder: Path
    fsid: str = field(default_factory=lambda: str(uuid.uuid4()))
    mon_addresses: str = ""
    rgw_port: int = 0
    daemons: dict[str, Child] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.rgw_port}"

    def start(self) -> None:
        """Start the three daemons, each when the one before it is ready."""
        self._configure()
        self._make_keys()
        self._start_monitor()
        self._start_osd()
        self._spawn("radosgw", "-n", "client.rgw.a", "-f")
        self._wait("the gateway answers", lambda: is_answering(self.url))
        self._run(
            *("radosgw-admin", "-n", "client.rgw.a", "user", "create", "--uid=test"),
            *("--display-name=test", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"),
        )

    def stop(self) -> None:
        """End the daemons, the gateway first; what it stored is not to be kept, so by force."""
        for daemon in reversed(self.daemons.values()):
            daemon.kill()

    def _configure(self) -> None:
        for name in ("mon", "osd", "run", "log", "rgw"):
            (self.folder / name).mkdir()
        mon_v2, mon_v1, self.rgw_port, first = free_ports(4)
        self.mon_addresses = f"[v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]"
        self._config.write_text(
            _CONFIG.format(
                fsid=self.fsid,
                folder=self.folder,
                mon_v2=mon_v2,
                mon_v1=mon_v1,
                rgw_port=self.rgw_port,
                osd_port=first,
                osd_port_end=first + 200,
            )
        )

    @property
    def _config(self) -> Path:
        return self.folder / "ceph.conf"

    def _make_keys(self) -> None:
        shared = f"{self.folder}/keyring"
        self._key(shared, "mon.", create=True, mon="allow *")
        self._key(shared, "client.admin", mon="allow *", osd="allow *", mgr="allow *")
        for name, owner, caps in (
            ("osd", "osd.0", {"mon": "allow profile osd", "osd": "allow *"}),
            ("rgw", "client.rgw.a", {"mon": "allow rw", "osd": "allow rwx"}),
        ):
            own = f"{self.folder}/{name}.keyring"
            self._key(own, owner, create=True, **caps)
            self._run("ceph-authtool", shared, "--import-keyring", own, configured=False)

    def _key(self, ring: str, name: str, *, create: bool = False, **caps: str) -> None:
        words = [word for what, how in caps.items() for word in ("--cap", what, how)]
        first = ("-C", ring) if create else (ring,)
        self._run("ceph-authtool", *first, "-g", "-n", name, *words, configured=False)

    def _start_monitor(self) -> None:
        monmap = f"{self.folder}/monmap"
        self._run(
            *("monmaptool", "--create", "--clobber", "--fsid", self.fsid),
            *("--addv", "a", self.mon_addresses, monmap),
            configured=False,
        )
        self._run(
            *("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap),
            *("--keyring", f"{self.folder}/keyring"),
        )
        self._spawn("ceph-mon", "-i", "a", "-f")

    def _start_osd(self) -> None:
        self._run("ceph", "osd", "create")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", str(uuid.uuid4()))
        self._spawn("ceph-osd", "-i", "0", "-f")
        self._wait("the object store daemon is up", self._osd_is_up)

    def _osd_is_up(self) -> bool:
        return "1 up" in self._run("ceph", "osd", "stat")

    def _run(self, *words: str, configured: bool = True) -> str:
        command = [words[0], "-c", str(self._config), *words[1:]] if configured else list(words)
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=STEP_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return done.stdout

    def _spawn(self, program: str, *words: str) -> None:
        command = [program, "-c", str(self._config), *words]
        log = self.folder / "log" / f"{program}.err"
        self.daemons[program] = start_child(program, command, log, _environment())

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            ended = [name for name, daemon in self.daemons.items() if not daemon.is_running]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(
                    f"Ceph did not start: waited for {START_S:.0f} s until {what}; ended:"
                    f" {ended or 'no daemon'}\n{self._log_tails()}"
                )
            time.sleep(0.2)

    def _log_tails(self) -> str:
        logs = sorted((self.folder / "log").iterdir())
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs
        )


def _environment() -> dict[str, str]:
    """Give this process's environment without what would lead to another cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CEPH_")}
