"""`streammeta controller` and `config`: run one controller, and show its settings."""

from __future__ import annotations

import importlib
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import click

from streammeta.cli.framework import client, config_file, connecting, tracing
from streammeta.cli.framework.config_file import origins
from streammeta.cli.framework.output import Output, with_output
from streammeta.controller.config import (
    AuditFailure,
    ConfigError,
    ControllerConfig,
    PeerPlainText,
    check_cluster_id,
    next_port,
    parse_peers,
)
from streammeta.controller.ids import ClusterId
from streammeta.storage.object_format.object_key import cluster_namespace
from streammeta.storage.object_store.protocol.address import without_secrets
from streammeta.tls.files import TlsError

_address_option = partial(click.option, metavar="HOST:PORT")
_file_option = partial(click.option, type=click.Path(path_type=Path, dir_okay=False))

_SETTINGS = {
    "election_timeout_ms": "Election timeout before the next attempt, at random up to twice"
    " as long.",
    "fetch_timeout_ms": "Time without an answer of the leader after which it counts as lost.",
    "snapshot_log_bytes": "Write a snapshot after this many bytes of log. The log before the"
    " last two snapshots is removed.",
    "snapshot_interval_ms": "Write a snapshot after this time, if anything has changed.",
    "backup_interval_ms": "Interval of copies to --backup-store. Newer commits can be lost"
    " with the controllers.",
    "backup_keep_ms": "Age up to which every point can be restored from --backup-store.",
    "lifecycle_interval_ms": "Interval of expiry and deletion.",
    "delete_delay_ms": "Time that the bytes of a destroyed object stay in the bucket.",
    "delete_rate": "Maximum objects deleted from the bucket per second. The rate falls while"
    " the bucket is overloaded.",
    "session_timeout_ms": "Session timeout: a broker that sends heartbeats and is silent for"
    " longer is fenced.",
    "recoveries_per_node": "Fenced brokers that one broker recovers at a time.",
    "sweep_interval_ms": "Interval of sweeps for dead objects and unfinished uploads of brokers.",
    "tls_reload_ms": "Interval of checks for replaced certificates. SIGHUP checks at once.",
    "connection_age_ms": "Maximum age of connections of clients, and of peers over TLS. They"
    " reconnect.",
    "request_memory_mb": "Memory for requests in flight, in MiB. One caller may use a fourth"
    " of it.",
    "memory_limit_mb": "Memory of the whole process in MiB. Above it the controller rejects"
    " calls that need more, some of them earlier. [default: 80 % of the"
    " machine's, or of the control group's]",
    "max_streams": "Maximum number of streams. At this limit, and at all limits below, the"
    " controller rejects new entries.",
    "max_prepared_objects": "Maximum number of objects that are prepared and not committed.",
    "max_nodes": "Maximum number of registered brokers.",
    "max_kv_keys": "Maximum number of keys.",
    "max_kv_bytes": "Maximum bytes of keys and values.",
    "max_tag_bytes": "Maximum characters of the tags of streams.",
    "max_producers": "Maximum number of idempotent producers, counted once per stream.",
}
"""Numbers of `ControllerConfig` that are options, and the help of each."""


def _setting_options(command: client.Command) -> client.Command:
    """Add the options of `_SETTINGS`, with the defaults of `ControllerConfig`."""
    defaults = {field.name: field.default for field in fields(ControllerConfig)}
    # A default of None is computed at the start. The help text describes it.
    options = (
        click.option(f"--{name.replace('_', '-')}", type=int, default=defaults[name], help=text)
        for name, text in _SETTINGS.items()
    )
    return client.add_options(*options)(command)


@click.command()
@config_file.config_option
@click.option("--node-id", type=int, required=True, help="Id of this controller, 0 to 999.")
@click.option(
    "--cluster-id", required=True, help="Name of the cluster, part of every object's key."
)
@_address_option("--listen", required=True, help="Address for clients.")
@_address_option(
    "--advertise", help="Address at which clients reach this controller. [default: --listen]"
)
@_address_option(
    "--peer-listen", help="Address for the other controllers. [default: one port above --listen]"
)
@_address_option(
    "--peer-advertise",
    help="Address at which the other controllers reach this one. [default: --peer-listen]",
)
@click.option(
    "--seeds",
    default="",
    show_default=False,
    metavar="ID@HOST:PORT,...",
    help="Controllers to ask for the leader, at their --peer-advertise: for one that joins,"
    " and when addresses have changed.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Data directory of this controller, formatted once by `streammeta storage format`.",
)
@click.option(
    "--store",
    "store_uri",
    envvar="STREAMMETA_CONTROLLER_STORE",
    required=True,
    metavar="URI",
    help="The bucket: s3://BUCKET?endpoint=URL&region=R&pathStyle=true or file:///DIR.",
)
@click.option(
    "--backup-store",
    metavar="URI",
    help="Bucket for a continuous copy of the committed log, for `streammeta backup`. Use"
    " another bucket than --store, with other credentials.",
)
@click.option("--namespace", help="Second part of every key. [default: _streammeta_CLUSTER-ID]")
@click.option(
    "--former-cluster-id",
    metavar="ID",
    help="Cluster that this one was restored from. Its certificates are valid here too."
    " [default: the one whose default namespace this cluster has]",
)
@_setting_options
@_file_option(
    "--tls-ca",
    help="CA certificates, as PEM. With this and the next two options, clients and the other"
    " controllers must present a certificate signed by one of them, over TLS 1.3. Files"
    " may be replaced at any time.",
)
@_file_option("--tls-cert", help="Certificate of this controller, issued by `streammeta certs`.")
@_file_option("--tls-key", help="Key of the certificate, readable by its owner only.")
@_address_option(
    "--tls-listen",
    help="Address for clients over TLS, in addition to plain text at --listen, during a"
    " migration to TLS.",
)
@_address_option(
    "--token-listen",
    help="Address for people's tools that present a token instead of a certificate, over TLS.",
)
@_address_option(
    "--token-advertise",
    help="Address at which these tools reach this controller. [default: --token-listen]",
)
@click.option(
    "--oidc-issuer",
    default="",
    show_default=False,
    metavar="URL",
    help="Issuer of these tokens, as the tokens name it.",
)
@click.option(
    "--oidc-audience", default="", show_default=False, help="Required audience of the tokens."
)
@click.option(
    "--oidc-keys",
    default="",
    show_default=False,
    metavar="FILE|URL",
    help="Keys that sign the tokens, as a JSON Web Key Set. A file may be replaced at any"
    " time. [default: the keys that the issuer publishes]",
)
@_file_option("--peer-tls-ca", help="Other CA certificates for the other controllers.")
@_file_option("--peer-tls-cert", help="Another certificate for the other controllers.")
@_file_option("--peer-tls-key", help="Its key.")
# click passes the context and the option too. Only the value counts.
@click.option(
    "--peer-plain-text",
    type=click.Choice([mode.value for mode in PeerPlainText]),
    callback=lambda *given: PeerPlainText(given[-1]),
    default=PeerPlainText.NONE.value,
    help="For a migration of controllers to TLS one by one: first all use plain text and"
    " accept both, then all accept both, then none.",
)
@_address_option(
    "--http-listen", help="Address for probes and metrics over HTTP: /livez, /readyz and /metrics."
)
@_file_option(
    "--http-tls-ca", help="Other CA certificates for --http-listen than --tls-ca, the default."
)
@_file_option("--http-tls-cert", help="Another certificate for --http-listen.")
@_file_option("--http-tls-key", help="Its key.")
@click.option(
    "--http-plain-text",
    is_flag=True,
    help="Serve HTTP in plain text despite TLS, for probes without a certificate.",
)
@click.option(
    "--http-plain-text-pages",
    is_flag=True,
    help="Also serve the status pages there. Then every caller that reaches the port can"
    " read names and tags of streams.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow plain text beyond loopback. Then every caller that reaches a port has full access.",
)
@click.option(
    "--peer-override",
    default="",
    show_default=False,
    metavar="ID@HOST:PORT,...",
    help="Addresses at which this controller reaches the named ones, for NAT and proxies."
    " They override all other addresses.",
)
@click.option(
    "--reflection",
    is_flag=True,
    help="Enable gRPC server reflection, which grpcurl uses.",
)
@tracing.tracing_option("commits and calls that come with a trace")
@_file_option(
    "--policy",
    help="TOML file that grants roles, denies certificates and assigns namespaces of keys."
    " It is read again when it changes.",
)
@_file_option(
    "--audit-log", help="Record calls in this file, for `streammeta audit`. - is standard output."
)
@click.option(
    "--audit-failure",
    type=click.Choice([mode.value for mode in AuditFailure]),
    default=AuditFailure.BLOCK_ADMIN.value,
    help="Calls to reject while --audit-log can't be written: operators' and destructive"
    " ones, all but heartbeats, or none.",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info"
)
@click.option(
    "--check-config",
    is_flag=True,
    help="Check the options, the data directory and the bucket, then exit without changes.",
)
def controller(
    *,
    cluster_id: str,
    listen: str,
    advertise: str | None,
    peer_listen: str | None,
    peer_advertise: str | None,
    seeds: str,
    namespace: str | None,
    peer_override: str,
    audit_failure: str,
    log_level: str,
    check_config: bool,
    **settings: Any,
) -> None:
    """Run one controller of a cluster.

    Create the data directory first with `streammeta storage format`, which also names the voters.
    Once the controller serves, it prints one line starting with `ready`. Logs go to standard
    error. Ctrl-C or SIGTERM ends it: a leader first transfers leadership. AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY are the credentials of the bucket.

    \b
    Example, a cluster of one:
      streammeta storage format --node-id 1 --cluster-id demo --data-dir data/1 \\
        --voters 1@127.0.0.1:9092
      streammeta controller --node-id 1 --cluster-id demo --data-dir data/1 \\
        --listen 127.0.0.1:9091 --store file:///var/lib/streammeta/bucket
    """
    try:
        check_cluster_id(cluster_id)
        peer_listen = peer_listen or next_port("listen", listen)
        config = ControllerConfig(
            cluster_id=ClusterId(cluster_id),
            listen=listen,
            advertise=advertise or listen,
            peer_listen=peer_listen,
            peer_advertise=peer_advertise or peer_listen,
            seeds=parse_peers("seeds", seeds),
            peer_overrides=parse_peers("peer-override", peer_override),
            tls=connecting.take_tls_files("tls", settings),
            peer_tls=connecting.take_tls_files("peer-tls", settings),
            http_tls=connecting.take_tls_files("http-tls", settings),
            audit_failure=AuditFailure(audit_failure),
            namespace=namespace or cluster_namespace(cluster_id),
            **settings,  # those whose options have the same names
        )
    except (ConfigError, TlsError) as error:
        raise click.UsageError(str(error)) from error
    # gRPC, boto3 and numpy load slowly, and `--help` does not need them.
    _import_structlog()
    from streammeta.controller.log_setup import configure_logging
    from streammeta.controller.process.server import check

    if check_config:
        check(config)
        click.echo("the configuration is valid")
        return
    configure_logging(log_level)
    _run(config)


def _run(config: ControllerConfig) -> None:
    from streammeta.controller.process.server import run

    with tracing.exporting_traces("streammeta-controller", wanted=config.tracing):
        run(config)


def _import_structlog() -> None:
    """Import structlog without Rich, which takes a tenth of the start time."""
    # Rich is loaded already, so hiding it would save nothing.
    if "rich" in sys.modules:
        return
    # None makes `import rich` fail, and structlog then works without it.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]


_COLUMNS = ("setting", "value", "origin")


@click.group()
def config() -> None:
    """Show the settings of a controller.

    \b
    Example:
      streammeta config show --config controller.toml
    """


# Options of `streammeta controller` are passed on and not interpreted here.
@config.command("show", context_settings={"ignore_unknown_options": True})
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF CONTROLLER]...")
@with_output
@click.pass_context
def show_command(context: click.Context, *, options: tuple[str, ...], output: Output) -> None:
    """Show each setting of `streammeta controller`, and its origin.

    The command accepts the options of `streammeta controller` and starts nothing. Origins are, in
    order of precedence: option, environment, file, default. Secrets in store addresses are hidden.

    \b
    Example:
      streammeta config show --config controller.toml --listen 10.0.0.1:9091
    """
    root = context.find_root()
    # make_context parses and validates the options as a start would, without running anything.
    called = controller.make_context("controller", list(options), parent=root)
    rows = []
    for setting, value, origin in origins(called):
        # Store addresses may contain access keys. No other setting is secret.
        is_store = setting in ("store", "backup-store") and value is not None
        shown = without_secrets(value) if is_store else value
        rows.append((setting, "" if shown is None else str(shown), origin))
    output.rows("settings", _COLUMNS, rows)
