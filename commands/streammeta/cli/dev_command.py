"""`streammeta dev`: a whole cluster on this machine in one command."""

import contextlib
import json
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import click

from streammeta.cli.local_cluster import READY_PREFIX, ChildFailedError, LocalCluster, free_ports
from streammeta.cli.output import CommandError, OutputFormat, fail, format_option

CONTROLLER_COUNT = 3


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep logs and objects here.  [default: a temporary directory, removed at the end]",
)
@click.option("--cluster-id", default="dev", show_default=True, help="The cluster's name.")
@click.option(
    "--port",
    type=click.IntRange(1, 65_533),
    help="First of three consecutive ports.  [default: free ones]",
)
@format_option
def dev(
    data_dir: Path | None, cluster_id: str, port: int | None, output_format: OutputFormat
) -> None:
    """Run three controllers and a local-directory store until Ctrl-C.

    \b
    Example:
      streammeta dev --port 9091
      streammeta shell --connect 127.0.0.1:9091 -- tree /
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with _root(data_dir) as root:
        bucket = root / "bucket"
        bucket.mkdir(parents=True, exist_ok=True)
        ports = free_ports(CONTROLLER_COUNT) if port is None else range(port, port + 3)
        cluster = LocalCluster(root, cluster_id, f"file://{bucket}", list(ports))
        try:
            cluster.start_all()
            _say_ready(cluster, output_format)
            _wait(cluster, stop)
        except ChildFailedError as error:
            hint = "correct what its log says and start again"
            fail(output_format, CommandError("CONTROLLER_ENDED", str(error), hint))
        finally:
            cluster.stop_all()


def _say_ready(cluster: LocalCluster, output_format: OutputFormat) -> None:
    """Print the one line of this command; it comes when clients can connect, not at the end."""
    if output_format is OutputFormat.JSON:
        click.echo(json.dumps({"ok": True, "connect": cluster.connect, "store": cluster.store_uri}))
    else:
        click.echo(f"{READY_PREFIX}connect={cluster.connect} store={cluster.store_uri}")


@contextlib.contextmanager
def _root(data_dir: Path | None) -> Iterator[Path]:
    if data_dir is not None:
        yield data_dir.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="streammeta-dev-") as folder:
        yield Path(folder)


def _wait(cluster: LocalCluster, stop: threading.Event) -> None:
    """Return when asked to stop; a controller that ends by itself is an error."""
    while not stop.wait(0.5):
        for child in cluster.children.values():
            if not child.is_running:
                raise ChildFailedError(
                    f"{child.name} ended with exit code {child.process.returncode}; "
                    f"the end of its log:\n{child.log_tail()}"
                )
