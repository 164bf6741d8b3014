"""`streammeta dev`: three controllers on loopback until Ctrl-C, over TLS if asked for.

Owns what it prints: one line once clients can connect, and the variables by which they do.
"""

import contextlib
import json
import shlex
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click

from streammeta.cli.local_cluster import READY_PREFIX, ChildFailedError, LocalCluster, free_ports
from streammeta.cli.output import CommandError, OutputFormat, fail, format_option
from streammeta.cli.signal_event import SignalEvent
from streammeta.rpc.identity import USER_ROLES, Role

CONTROLLER_COUNT = 3
BROKER_IDS = range(1, 11)
"""Node ids of brokers that get a certificate; `streammeta certs` makes others."""


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep logs and objects here.  [default: a temporary directory, removed at the end]",
)
@click.option("--cluster-id", default="dev", show_default=True, help="The cluster's name.")
@click.option(
    "--port",
    type=click.IntRange(1, 65_530),
    help="First of six consecutive ports: three for clients, then three for the controllers among"
    " themselves.  [default: free ones]",
)
@click.option(
    "--tls",
    "has_tls",
    is_flag=True,
    help="Speak TLS, with certificates of a throw-away authority for controllers, brokers and"
    " users; prints the variables by which commands connect as an administrator.",
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

    With --tls the folder `certificates` of its data directory holds those of brokers 1 to 10 and
    one for each role, such as reader-dev.pem.

    \b
    Examples:
      streammeta dev --port 9091
      streammeta shell --connect 127.0.0.1:9091 -- tree /
      streammeta dev --tls --data-dir ./dev
    """
    stop = SignalEvent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.ExitStack() as stack:
        if data_dir is None:
            folder = tempfile.TemporaryDirectory(prefix="streammeta-dev-")
            data_dir = Path(stack.enter_context(folder))
        root = data_dir.absolute()
        bucket = root / "bucket"
        bucket.mkdir(parents=True, exist_ok=True)
        ports = free_ports(2 * CONTROLLER_COUNT) if port is None else list(range(port, port + 6))
        cluster = LocalCluster(
            root,
            cluster_id,
            f"file://{bucket}",
            ports[:CONTROLLER_COUNT],
            peer_ports=ports[CONTROLLER_COUNT:],
        )
        variables = _certify(cluster) if has_tls else {}
        try:
            cluster.start_all()
            _say_ready(cluster, variables, output_format)
            _wait(cluster, stop)
        except ChildFailedError as error:
            hint = "correct what its log says and start again"
            fail(output_format, CommandError("CONTROLLER_ENDED", str(error), hint))
        finally:
            cluster.stop_all()


def _certify(cluster: LocalCluster) -> Mapping[str, str]:
    """Make all certificates; return the variables for an administrator."""
    from streammeta.cli.local_certificates import LocalCertificates, environment

    certificates = LocalCertificates(cluster.root, cluster.cluster_id)
    cluster.tls = certificates.controllers(cluster.node_ids)
    for node_id in BROKER_IDS:
        certificates.of(Role.BROKER, node_id)
    users = {role: certificates.of(role, "dev") for role in USER_ROLES}
    return environment(cluster.connect, users[Role.ADMIN])


def _say_ready(
    cluster: LocalCluster, variables: Mapping[str, str], output_format: OutputFormat
) -> None:
    """Print what connects; it comes when clients can connect, not at the end."""
    if output_format is OutputFormat.JSON:
        answer = {"ok": True, "connect": cluster.connect, "store": cluster.store_uri}
        click.echo(json.dumps(answer | ({"environment": variables} if variables else {})))
        return
    click.echo(f"{READY_PREFIX}connect={cluster.connect} store={cluster.store_uri}")
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _wait(cluster: LocalCluster, stop: SignalEvent) -> None:
    """Return when asked to stop; a controller that ends by itself is an error."""
    while not stop.wait(0.5):
        for child in cluster.children.values():
            if not child.is_running:
                raise ChildFailedError(
                    f"{child.name} ended with exit code {child.process.returncode}; "
                    f"the end of its log:\n{child.log_tail()}"
                )
