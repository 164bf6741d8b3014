"""Three real controllers whose planes are protected or not, each by itself."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports, tls_words
from streammeta.tls.files import TlsFiles
from tests.kit.certificates import Authority
from tests.kit.real_cluster import STEADY, put
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm
from tests.monitoring.http_calls import get, samples


@dataclass(frozen=True)
class Planes:
    """Planes over TLS; the others are in plain text."""

    clients: bool = True
    peers: bool = True
    http: bool = True

    def __str__(self) -> str:
        return "-".join(
            "tls" if is_tls else "plain" for is_tls in (self.clients, self.peers, self.http)
        )

    def options(self, files: TlsFiles, http_endpoint: str) -> Sequence[str]:
        """Return the options of one controller beside those for clients."""
        words = ["--http-listen", http_endpoint]
        if self.clients and not self.peers:
            words += ["--peer-plain-text", "spoken"]
        elif self.peers and not self.clients:
            words += tls_words(files, "peer-tls")
        if self.clients and not self.http:
            words += ["--http-plain-text"]
        elif self.http and not self.clients:
            words += tls_words(files, "http-tls")
        return words


@dataclass
class Planed:
    """The running controllers; `admin` and `monitor` are certificates for those of a role."""

    cluster: LocalCluster
    planes: Planes
    authority: Authority
    http_endpoints: Sequence[str]

    @property
    def admin(self) -> TlsFiles | None:
        return self.authority.issue("admin/alice") if self.planes.clients else None

    @property
    def monitor(self) -> TlsFiles | None:
        return self.authority.issue("monitor/m") if self.planes.http else None

    def page(self, path: str, node_id: int = 1) -> tuple[int, str]:
        return get(self.http_endpoints[node_id - 1], path, self.monitor)

    def metrics(self, node_id: int = 1) -> dict[str, float]:
        status, text = self.page("/metrics", node_id)
        assert status == 200, text
        return samples(text)

    def write(self, key: str) -> None:
        """Put a key, as a client of this plane."""
        with ControllerClient(self.cluster.endpoints, tls=self.admin) as client:
            put(client, key, "value")

    def wait_ready(self) -> None:
        for node_id in self.cluster.node_ids:
            wait_until(lambda: self.page("/readyz", node_id)[0] == 200, "it is ready")  # noqa: B023


@contextmanager
def running(
    root: Path,
    authority: Authority,
    planes: Planes,
    options: Sequence[str] = STEADY,
    own: TlsFiles | None = None,
) -> Iterator[Planed]:
    """Start three controllers; `own` are the files of the first instead of those issued to it."""
    root.mkdir(exist_ok=True)
    (root / "bucket").mkdir()
    files = {node_id: authority.issue(f"controller/{node_id}") for node_id in (1, 2, 3)}
    if own is not None:
        files[1] = own
    http = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = LocalCluster(
        root,
        "test",
        f"file://{root / 'bucket'}",
        free_ports(3),
        options,
        tls=files if planes.clients else {},
        own_options={n: planes.options(files[n], http[n - 1]) for n in files},
        starter=start_warm,
    )
    try:
        cluster.start_all()
        yield Planed(cluster, planes, authority, http)
    finally:
        cluster.stop_all()


def limit_files(pid: int, size: int) -> None:
    """Let every write of a process beyond a size fail, as on a full disk."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
