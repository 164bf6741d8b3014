"""`streammeta kafka`: a broker for Kafka clients, until it is stopped.

Owns options and the line printed once the broker serves. `streammeta.brokers.kafka` does the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from streammeta.cli.brokers.node_command import NODE_ID_MAX
from streammeta.cli.framework.client import store_option
from streammeta.cli.framework.connecting import connecting, take_tls_files
from streammeta.cli.framework.output import (
    CommandError,
    Duration,
    Output,
    OutputFormat,
    explain,
    fail,
    format_option,
    with_output,
)
from streammeta.cli.framework.tracing import exporting_traces, tracing_option
from streammeta.cli.local.local_cluster import READY_PREFIX
from streammeta.tls.files import CallerFiles, TlsError, TlsFiles

if TYPE_CHECKING:
    from streammeta.brokers.kafka.service.process import KafkaConfig

SESSION_MS_MIN = 2_000
"""Shortest session timeout that controllers accept."""

_FILE = click.Path(dir_okay=False, path_type=Path)


def _address(
    _: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[str, int] | None:
    if value is None:
        return None
    # rpartition leaves the colons of an IPv6 address alone. int() would accept digits of any
    # script.
    host, separator, port = value.rpartition(":")
    if not (host and separator and port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise click.BadParameter(f"{value!r} is not HOST:PORT", param=parameter)
    return host.strip("[]"), int(port)


@click.command()
@connecting()
@store_option
@click.option(
    "--node-id",
    type=click.IntRange(0, NODE_ID_MAX),
    required=True,
    help="Id of this broker, unique in the cluster.",
)
@click.option(
    "--listen",
    default="127.0.0.1:9092",
    metavar="HOST:PORT",
    callback=_address,
    help="Address for Kafka clients. Port 0 selects a free one.",
)
@click.option(
    "--advertise",
    metavar="HOST:PORT",
    callback=_address,
    help="Address that the broker announces to clients. [default: --listen]",
)
@click.option(
    "--listen-tls-ca",
    type=_FILE,
    help="CA certificates for clients. With them clients can only connect over TLS.",
)
@click.option("--listen-tls-cert", type=_FILE, help="Certificate of the broker.")
@click.option("--listen-tls-key", type=_FILE, help="Private key of the certificate.")
@click.option(
    "--users",
    type=_FILE,
    help="File of users and their password hashes, read again when it changes. With it"
    " clients authenticate by SASL/PLAIN and need no certificate.",
)
@click.option(
    "--plain-text-passwords",
    is_flag=True,
    help="Allow --users without TLS on an address that is not loopback.",
)
@click.option(
    "--linger",
    type=Duration(),
    default="50ms",
    help="Time that records wait for others of the same object.",
)
@click.option(
    "--session",
    type=Duration(),
    default="6s",
    help="Silence after which other brokers take over the partitions, at least 2s and at"
    " most the controllers' session timeout.",
)
@click.option(
    "--partitions",
    type=click.IntRange(1, 10_000),
    default=1,
    help="Partitions of topics that are created without a number.",
)
@click.option(
    "--auto-create/--no-auto-create",
    default=True,
    help="Create topics that producers and consumers name.",
)
@click.option(
    "--shared",
    "is_shared",
    is_flag=True,
    help="Serve topics without leaders: those created with diskless.enable=true. It needs feature"
    " level 5.",
)
@click.option(
    "--rack",
    help="Rack or zone of this broker. Clients of a topic without leaders stay in the rack of the"
    " broker that they ask for metadata.",
)
@click.option(
    "--http-listen",
    metavar="HOST:PORT",
    callback=_address,
    help="Address for probes and metrics over plain HTTP: /livez, /readyz and /metrics.",
)
@tracing_option("Produce and Fetch requests, down to the controllers")
@format_option
def kafka(
    *,
    connect: tuple[str, ...],
    tls: CallerFiles | None,
    listen: tuple[str, int],
    advertise: tuple[str, int] | None,
    users: Path | None,
    plain_text_passwords: bool,
    linger: int,
    session: int,
    partitions: int,
    auto_create: bool,
    http_listen: tuple[str, int] | None,
    tracing: bool,
    output_format: OutputFormat,
    **settings: Any,
) -> None:
    """Run a broker for Kafka clients, until Ctrl-C.

    Partitions are logs on streams. The brokers of a cluster share them and take over the streams of
    a dead broker. The broker acknowledges records once their object is committed.

    With --shared, every broker writes and reads the topics that are created with
    diskless.enable=true.

    \b
    Examples:
      streammeta dev --port 9101 --data-dir /tmp/dev
      streammeta kafka --connect 127.0.0.1:9101 --store file:///tmp/dev/bucket --node-id 1
      streammeta kafka --shared --rack a --listen 127.0.0.1:9093 --node-id 2 ...
    """
    # The broker's packages load slowly, and --help does not need them.
    from streammeta.brokers.kafka.service.process import KafkaConfig
    from streammeta.brokers.kafka.service.users import UsersFileError

    if session < SESSION_MS_MIN:
        raise click.UsageError(f"--session is {session} ms, expected at least 2s")
    try:
        listen_tls = take_tls_files("listen-tls", settings)
    except TlsError as error:
        raise click.UsageError(str(error)) from error
    if users is not None and listen_tls is None and not plain_text_passwords:
        _require_loopback(listen[0])

    # Logs go to standard error. Standard output is reserved for the ready line.
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    config = KafkaConfig(
        controllers=connect,
        host=listen[0],
        port=listen[1],
        advertised=advertise,
        linger_s=linger / 1000,
        session_s=session / 1000,
        default_partitions=partitions,
        creates_topics=auto_create,
        tls=_certificate_files(tls),
        listen_tls=listen_tls,
        users=users,
        http=http_listen,
        **settings,  # those whose options have the same names
    )
    try:
        # Tracing ends after the broker, so that its last spans are sent.
        with exporting_traces("streammeta-kafka", wanted=tracing):
            asyncio.run(_run(config, output_format))
    # Not one of EXPECTED_ERRORS, because its package is imported here only.
    except UsersFileError as error:
        fail(output_format, CommandError("USERS_FILE", str(error), "correct the file"))
    except Exception as error:  # noqa: BLE001 - every cause of an end is reported in one form
        fail(output_format, explain(error))


def _certificate_files(tls: CallerFiles | None) -> TlsFiles | None:
    """Return the broker's own TLS files. Tokens are for people's tools only."""
    if tls is not None and not isinstance(tls, TlsFiles):
        raise click.UsageError(
            "token-file: a broker needs a certificate. Set --tls-cert and --tls-key"
        )
    return tls


def _require_loopback(host: str) -> None:
    """Reject an address at which others could read passwords."""
    # Names are not resolved, because their addresses may change later. Only localhost is trusted.
    try:
        is_loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise click.UsageError(
            f"--users: passwords would be sent in plain text to {host}. Set --listen-tls-ca,"
            " --listen-tls-cert and --listen-tls-key, or --plain-text-passwords if another"
            " layer encrypts"
        )


@click.command("kafka-user")
@click.argument("name")
@with_output
def kafka_user(name: str, output: Output) -> None:
    """Print the line for NAME in a file of users (--users).

    A terminal prompts for the password. Otherwise it is the first line of standard input.

    \b
    Example:
      streammeta kafka-user alice >> users
    """
    from streammeta.brokers.kafka.service.users import user_entry

    # Prompts go to standard error: standard output is often redirected into the file of users.
    if sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    try:
        entry = user_entry(name, password)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    output.text("entry", entry)


async def _run(config: KafkaConfig, output_format: OutputFormat) -> None:
    """Run a broker until a signal stops it, even while it still joins the cluster."""
    # A second signal changes nothing, so that it can't interrupt the broker's orderly shutdown.
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(_serve(config, output_format))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    serving.cancel()
    # If serving failed by itself, this raises its error. After a signal it was only cancelled.
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _serve(config: KafkaConfig, output_format: OutputFormat) -> NoReturn:
    """Serve until cancelled. Raises fatal errors, such as a newer process of the node."""
    from streammeta.brokers.kafka.service.process import running_broker

    async with running_broker(config) as broker:
        address = f"{broker.host}:{broker.port}"
        # Scripts wait for this line. It is printed once clients can connect.
        if output_format is OutputFormat.JSON:
            answer = {"ok": True, "bootstrap_servers": address, "node_id": config.node_id}
            if broker.http:
                answer["http"] = broker.http
            click.echo(json.dumps(answer))
        else:
            http = f" http={broker.http}" if broker.http else ""
            click.echo(f"{READY_PREFIX}bootstrap.servers={address} node_id={config.node_id}{http}")
        raise await asyncio.shield(broker.replaced)  # it ends after its listener
