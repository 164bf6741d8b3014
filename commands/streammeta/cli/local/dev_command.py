"""`streammeta dev`: three controllers on loopback until Ctrl-C, with optional TLS.

Owns the printed lines: one once clients can connect, the variables to connect with, and the address
of each controller. It restarts controllers that end.

The folders `certificates` and `private` contain certificates of a throw-away CA, and its key. Their
files grant full access to the cluster, so use them for development only.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.framework.output import CommandError, OutputFormat, fail, format_option
from streammeta.cli.framework.signal_event import SignalEvent
from streammeta.cli.local.local_cluster import (
    READY_PREFIX,
    ChildFailedError,
    LocalCluster,
    Supervisor,
    free_ports,
    taken_ports,
)
from streammeta.cli.quorum.features_command import change_level
from streammeta.cli.security.certificate_authority import Authority, IssuedFiles, create_authority
from streammeta.controller.features import SUPPORTED
from streammeta.tls.files import TlsError, TlsFiles
from streammeta.tls.identity import USER_ROLES, Principal, Role

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class LocalCertificates:
    """Certificates of one cluster below `root`. Certificates of an earlier run are reused."""

    def __init__(self, root: Path, cluster_id: str) -> None:
        """Create the CA if it does not exist.

        Raises:
            CertificateError: the existing CA is invalid.
            OSError: the files can't be written.
        """
        self.folder = root / "certificates"
        self.ca_key = root / "private" / "ca.key"
        self._cluster_id = cluster_id
        files = IssuedFiles(self.folder / "ca.pem", self.ca_key)
        # Another CA would invalidate the certificates of earlier runs.
        if not files.certificate.exists():
            create_authority(files, f"throw-away CA of {cluster_id}")
        self._authority = Authority(files)

    def of(self, role: Role, name: str | int) -> TlsFiles:
        """Return the files of a principal on loopback, created on the first call."""
        stem = f"{role}-{name}"
        ca, certificate, key = (self.folder / n for n in ("ca.pem", f"{stem}.pem", f"{stem}.key"))
        files = TlsFiles(ca, certificate, key)
        # Files are never overwritten, so expired ones are removed first.
        if not self._is_of_use(files):
            certificate.unlink(missing_ok=True)
            key.unlink(missing_ok=True)
            principal = Principal(self._cluster_id, role, str(name))
            self._authority.issue(IssuedFiles(certificate, key), principal, LOOPBACK)
        return files

    def controllers(self, node_ids: Sequence[int]) -> Mapping[int, TlsFiles]:
        """Return the files of these controllers."""
        return {node_id: self.of(Role.CONTROLLER, node_id) for node_id in node_ids}

    @staticmethod
    def _is_of_use(files: TlsFiles) -> bool:
        if not files.certificate.exists():
            return False
        try:
            files.load()
        except TlsError:
            return False  # it has expired
        return True


def environment(connect: str, files: TlsFiles) -> Mapping[str, str]:
    """Return the variables with which commands connect. `connect` is in the form of `--connect`."""
    return {
        "STREAMMETA_CONNECT": connect,
        "STREAMMETA_TLS_CA": str(files.ca),
        "STREAMMETA_TLS_CERT": str(files.certificate),
        "STREAMMETA_TLS_KEY": str(files.key),
    }


CONTROLLER_COUNT = 3
PORT_COUNT = 3 * CONTROLLER_COUNT
"""Each controller has listeners for clients, for the other controllers and for browsers."""

BROKER_IDS = range(1, 11)
"""Node ids of brokers that get a certificate. `streammeta certs` creates others."""

LEVEL_PENDING = "feature-level-pending"
"""File in the data directory of a new cluster that has not reached the newest level yet."""

_LEVEL_TIMEOUT_S = 60.0
_LOOK_S = 0.25


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for logs and objects. [default: a temporary directory, removed at the end]",
)
@click.option("--cluster-id", default="dev", help="Name of the cluster.")
@click.option(
    "--port",
    type=click.IntRange(1, 65_536 - PORT_COUNT),
    help="First of nine consecutive ports: three for clients, three for peers, three for"
    " status pages. [default: free ones]",
)
@click.option(
    "--tls",
    "has_tls",
    is_flag=True,
    help="Use TLS, with certificates of a throw-away CA for controllers, brokers and users."
    " Prints the variables with which commands connect as an administrator. Status pages"
    " stay in plain text.",
)
@format_option
def dev(
    *,
    data_dir: Path | None,
    cluster_id: str,
    port: int | None,
    has_tls: bool,
    output_format: OutputFormat,
) -> None:
    """Run three controllers and a local-directory store until Ctrl-C.

    The command restarts a controller that ends: kill one to watch a failover. A new cluster starts
    at the newest feature level. With --tls the folder `certificates` of its data directory contains
    certificates for brokers 1 to 10 and one per role, such as reader-dev.pem.

    \b
    Examples:
      streammeta dev --port 9091
      streammeta shell --connect 127.0.0.1:9091 -- tree /
      streammeta dev --tls --data-dir ./dev
    """
    # Handlers come first: Ctrl-C during the start must still stop the controllers.
    stop = SignalEvent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    # A port that is taken should fail before anything is created.
    ports = free_ports(PORT_COUNT) if port is None else _check_ports(port, output_format)

    with contextlib.ExitStack() as stack:
        if data_dir is None:
            # The stack removes the folder after `finally` has stopped the controllers.
            folder = tempfile.TemporaryDirectory(prefix="streammeta-dev-")
            data_dir = Path(stack.enter_context(folder))
        cluster = _plan_cluster(data_dir.absolute(), cluster_id, ports, has_tls=has_tls)
        admin = _certify(cluster) if has_tls else None
        try:
            cluster.start_all()
            # The ready line comes afterwards, so that clients find the newest level.
            _raise_level(cluster, admin, stop)
            _say_ready(cluster, admin, output_format)
            supervisor = Supervisor(cluster, _say)
            # The wait is also the interval at which ended controllers are noticed.
            while not stop.wait(_LOOK_S):
                supervisor.look()
        # Only the first start raises this. Controllers that end later are restarted.
        except ChildFailedError as error:
            hint = "see its log, correct the cause and start again"
            fail(output_format, CommandError("CONTROLLER_ENDED", str(error), hint))
        finally:
            cluster.stop_all()


def _check_ports(first: int, output_format: OutputFormat) -> list[int]:
    """Return the ports from `first` on. End the command if another process uses one."""
    ports = list(range(first, first + PORT_COUNT))
    if taken := taken_ports(ports):
        names = ", ".join(map(str, taken))
        message = f"port: {first} needs {ports[0]} to {ports[-1]}, but another process uses {names}"
        hint = "stop that process, or choose another --port. Without it dev selects free ports"
        fail(output_format, CommandError("PORT_IN_USE", message, hint))
    return ports


def _plan_cluster(
    root: Path, cluster_id: str, ports: Sequence[int], *, has_tls: bool
) -> LocalCluster:
    """Return a cluster that is not started. Mark a new one for the newest feature level."""
    bucket = root / "bucket"
    bucket.mkdir(parents=True, exist_ok=True)
    clients, peers, pages = (
        list(ports[start : start + CONTROLLER_COUNT])
        for start in range(0, PORT_COUNT, CONTROLLER_COUNT)
    )
    listeners = {
        node_id: ("--http-listen", f"127.0.0.1:{page}")
        for node_id, page in enumerate(pages, start=1)
    }
    # A browser has no certificate, and the pages of a cluster on loopback hold no secret.
    in_plain_text = ("--http-plain-text", "--http-plain-text-pages") if has_tls else ()
    cluster = LocalCluster(
        root,
        cluster_id,
        f"file://{bucket}",
        clients,
        in_plain_text,
        peer_ports=peers,
        own_options=listeners,
    )
    # A file outlasts a start that ends early. Without it, the next start could not recognise a new
    # cluster.
    if not cluster.is_formatted:
        (root / LEVEL_PENDING).touch()

    return cluster


def _certify(cluster: LocalCluster) -> TlsFiles:
    """Create all certificates. Return the administrator's."""
    # cryptography loads slowly, and only TLS needs it.
    from streammeta.cli.local.dev_command import LocalCertificates

    certificates = LocalCertificates(cluster.root, cluster.cluster_id)
    cluster.tls = certificates.controllers(cluster.node_ids)
    for node_id in BROKER_IDS:
        certificates.of(Role.BROKER, node_id)
    users = {role: certificates.of(role, "dev") for role in USER_ROLES}
    return users[Role.ADMIN]


def _raise_level(cluster: LocalCluster, admin: TlsFiles | None, stop: SignalEvent) -> None:
    """Raise a new cluster to the newest feature level, once all controllers have connected.

    An existing cluster keeps its level, which its operator raises.
    """
    pending = cluster.root / LEVEL_PENDING
    if not pending.exists():
        return
    deadline = time.monotonic() + _LEVEL_TIMEOUT_S

    with ControllerClient(cluster.endpoints, tls=admin) as client:
        while not stop.is_set():
            try:
                change_level(client, SUPPORTED.highest)
            except CallError as error:  # no leader yet, or a follower has not connected to it
                if time.monotonic() > deadline:
                    _say(
                        f"the cluster stays below feature level {SUPPORTED.highest}, raise it with"
                        f" `streammeta features upgrade --to {SUPPORTED.highest}`: {error}"
                    )
                    return
                stop.wait(_LOOK_S)
            else:
                pending.unlink()
                return


def _say_ready(cluster: LocalCluster, admin: TlsFiles | None, output_format: OutputFormat) -> None:
    """Print the connection details, once clients can connect."""
    from streammeta.cli.local.dev_command import environment

    variables = {} if admin is None else environment(cluster.connect, admin)
    places = [
        {
            "node_id": node_id,
            "pid": cluster.children[node_id].pid,
            "endpoint": cluster.endpoints[node_id - 1],
            "status": f"http://{cluster.own_options[node_id][1]}/",
        }
        for node_id in cluster.node_ids
    ]
    if output_format is OutputFormat.JSON:
        answer = {"ok": True, "connect": cluster.connect, "store": cluster.store_uri}
        answer_with_tls = answer | ({"environment": variables} if variables else {})
        click.echo(json.dumps(answer_with_tls | {"controllers": places}))
        return
    click.echo(f"{READY_PREFIX}connect={cluster.connect} store={cluster.store_uri}")
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")
    for place in places:
        click.echo(
            f"# controller {place['node_id']} at {place['endpoint']}: pid {place['pid']},"
            f" status page {place['status']}"
        )


def _say(line: str) -> None:
    """Report on standard error. Standard output contains the result, in json one object."""
    click.echo(f"streammeta: {line}", err=True)
