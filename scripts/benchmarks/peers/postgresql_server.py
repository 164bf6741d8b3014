"""A PostgreSQL server as a child of the benchmark, from Debian's package `postgresql`.

It runs with its defaults, except for shared buffers of 1 GB, in a temporary directory on a free
port of loopback, and flushes to disk before it acknowledges. The package need not run as a service.
"""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from scripts.benchmarks.figures import BenchmarkError
from scripts.benchmarks.peers.servers import READY_WITHIN_S, PeerError
from streammeta.cli.local.local_cluster import Child, free_ports, start_child

HOMES = Path("/usr/lib/postgresql")
ACCOUNT = "postgres"
"""Account of the system, since PostgreSQL refuses root, and name of the superuser."""
_SETTINGS = (
    "fsync=on",
    "synchronous_commit=on",
    "shared_buffers=1GB",
    "listen_addresses=127.0.0.1",
)
_POLL_S = 0.1
_END_WITHIN_S = 60.0


def missing() -> str:
    """Return what is not installed and how to install it, "" if everything is."""
    if _home() is None:
        return f"no PostgreSQL server in {HOMES}: install Debian's package postgresql"
    if importlib.util.find_spec("asyncpg") is None:
        return "no asyncpg, its client: run ./scripts/setup"
    return ""


@contextlib.asynccontextmanager
async def running_postgresql(root: Path) -> AsyncIterator[tuple[str, int]]:
    """Run a server until the block ends, and yield its endpoint and pid. Its logs are in `root`.

    Raises:
        BenchmarkError: server or client is missing, or the server did not start.
    """
    if reason := missing():
        raise BenchmarkError(reason)
    home, (port,) = _home(), free_ports(1)
    with _own_directory(root) as data:
        initialize = (
            *(f"{home}/bin/initdb", "--pgdata", str(data), "--auth", "trust"),
            *("--username", ACCOUNT, "--encoding", "UTF8", "--no-locale"),
        )
        made = _start("initdb", initialize, root)
        if await asyncio.to_thread(made.wait_end, READY_WITHIN_S) != 0:
            raise PeerError(f"initdb failed; its log:\n{made.log_tail()}")

        options = [word for setting in _SETTINGS for word in ("-c", setting)]
        command = (f"{home}/bin/postgres", "-D", str(data), "-p", str(port), "-k", "", *options)
        server = _start("postgresql", command, root)
        try:
            await _wait_listening(server, port)
            yield f"127.0.0.1:{port}", server.pid
        finally:
            server.ask_to_end()
            await asyncio.to_thread(server.wait_end, _END_WITHIN_S)


def _home() -> Path | None:
    """Return the directory of the newest installed version."""
    homes = [path.parent.parent for path in HOMES.glob("*/bin/postgres")]
    return max(homes, key=lambda home: float(home.name), default=None)


@contextlib.contextmanager
def _own_directory(root: Path) -> Iterator[Path]:
    """Create `root`, and a directory for the server's account as deep in it as that may go."""
    root.mkdir(parents=True, exist_ok=True)
    place = root if os.geteuid() else _open_ancestor(root)
    path = Path(tempfile.mkdtemp(prefix="streammeta-bench-postgresql-", dir=place))
    try:
        if os.geteuid() == 0:
            shutil.chown(path, ACCOUNT, ACCOUNT)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _open_ancestor(path: Path) -> Path:
    """Return the last directory on the way to `path` that every account can enter."""
    deepest = Path("/")
    for folder in reversed([path, *path.parents]):
        if not folder.stat().st_mode & 0o001:
            break
        deepest = folder
    return deepest


def _start(name: str, command: Sequence[str], root: Path) -> Child:
    account = (
        *("setpriv", f"--reuid={ACCOUNT}", f"--regid={ACCOUNT}", "--clear-groups"),
        # A change of accounts undoes what `start_child` asked for.
        *("--pdeathsig", "TERM", "--"),
    )
    words = [*(() if os.geteuid() else account), *command]
    # Nobody reads standard output, so it goes to the log.
    return start_child(name, ["sh", "-c", 'exec "$@" >&2', "sh", *words], root / f"{name}.log")


async def _wait_listening(server: Child, port: int) -> None:
    from scripts.benchmarks.peers.postgresql_client import connect

    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if not server.is_running:
            raise PeerError(f"postgresql ended; its log:\n{server.log_tail()}")
        with contextlib.suppress(OSError):
            await (await connect(f"127.0.0.1:{port}")).close()
            return
        await asyncio.sleep(_POLL_S)
    raise PeerError(f"postgresql did not listen within {READY_WITHIN_S:.0f} s")
