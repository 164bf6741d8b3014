"""`streammeta controller`: run one controller until Ctrl-C or SIGTERM."""

import importlib
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from streammeta.cli.framework.client import Command
from streammeta.cli.framework.config_file import config_option
from streammeta.cli.framework.tracing import exporting_traces, tracing_option
from streammeta.controller.config import (
    AuditFailure,
    ConfigError,
    ControllerConfig,
    PeerPlainText,
    check_cluster_id,
    next_port,
    parse_peers,
)
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.storage.object_format.object_key import cluster_namespace
from streammeta.tls.files import TlsError, TlsFiles, tls_files

_FILE = click.Path(path_type=Path, dir_okay=False)

_SETTINGS = {
    "election_timeout_ms": "Time that an election may take before another begins; up to twice as"
    " long, at random.",
    "fetch_timeout_ms": "Time without an answer of the leader after which it counts as lost.",
    "snapshot_log_bytes": "Write a snapshot after this many bytes of log; the log before the last"
    " two is removed.",
    "snapshot_interval_ms": "Write a snapshot after this time, if anything has changed.",
    "backup_interval_ms": "Interval of copies to --backup-store; what is not there can be lost.",
    "backup_keep_ms": "Age up to which any point can be restored from --backup-store.",
    "lifecycle_interval_ms": "Interval of expiry and deletion.",
    "delete_delay_ms": "Time that a destroyed object's bytes stay in the bucket.",
    "delete_rate": "Objects deleted from the bucket a second, at most; fewer while the bucket is"
    " overloaded.",
    "session_timeout_ms": "A broker that sends heartbeats and is silent for longer is fenced.",
    "recoveries_per_node": "Fenced brokers that one broker recovers at a time.",
    "sweep_interval_ms": "Interval of sweeps for dead objects and unfinished uploads of brokers.",
    "tls_reload_ms": "Interval of looking for replaced certificates; SIGHUP looks at once.",
    "connection_age_ms": "Age at which connections of clients, and of peers over TLS, end; they"
    " make new ones.",
    "request_memory_mb": "Memory for requests that have arrived and are not answered, in MiB; one"
    " caller may take a fourth of it.",
    "memory_limit_mb": "Memory of the whole process in MiB; above it calls that need more are"
    " refused, some of them before.  [default: 80 % of the machine's, or of the control group's]",
    "max_streams": "Streams in the map; creating more is refused, as it is for all limits below.",
    "max_prepared_objects": "Objects that are prepared and not committed yet.",
    "max_nodes": "Brokers that have registered.",
    "max_kv_keys": "Keys.",
    "max_kv_bytes": "Bytes of keys and values.",
    "max_tag_bytes": "Characters of the tags of streams.",
}
"""Numbers of `ControllerConfig` that are options, and the help of each."""


def _setting_options(command: Command) -> Command:
    """Add the options of `_SETTINGS`, with the defaults of `ControllerConfig`."""
    defaults = {field.name: field.default for field in fields(ControllerConfig)}
    for name, text in reversed(_SETTINGS.items()):
        option = f"--{name.replace('_', '-')}"
        command = click.option(
            option,
            type=int,
            default=defaults[name],
            show_default=defaults[name] is not None,
            help=text,
        )(command)
    return command


def _files(option: str, settings: dict[str, Any]) -> TlsFiles | None:
    """Take the three options of a set of files out of `settings`."""
    name = option.replace("-", "_")
    ca, certificate, key = (settings.pop(f"{name}_{part}") for part in ("ca", "cert", "key"))
    return tls_files(ca, certificate, key, option)


@click.command()
@config_option
@click.option("--node-id", type=int, required=True, help="This controller's id, 0 to 999.")
@click.option("--cluster-id", required=True, help="The cluster's name; part of every object's key.")
@click.option("--listen", required=True, metavar="HOST:PORT", help="Where to listen for clients.")
@click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="Where clients reach this controller.  [default: what --listen says]",
)
@click.option(
    "--peer-listen",
    metavar="HOST:PORT",
    help="Where to listen for the other controllers.  [default: one port above that of --listen]",
)
@click.option(
    "--peer-advertise",
    metavar="HOST:PORT",
    help="Where the other controllers reach this one.  [default: what --peer-listen says]",
)
@click.option(
    "--seeds",
    default="",
    metavar="ID@HOST:PORT,...",
    help="Controllers to ask for the leader, at their --peer-advertise: for one that joins, and"
    " when addresses have changed.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="This controller's own directory, made ready once by `streammeta storage format`.",
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
    help="Copy the committed log to this bucket all the while, for `streammeta backup`; best"
    " another one than --store, with other credentials.",
)
@click.option("--namespace", help="Second part of every key.  [default: _streammeta_CLUSTER-ID]")
@click.option(
    "--former-cluster-id",
    metavar="ID",
    help="Cluster that this one was restored from: its certificates hold here too."
    "  [default: the one whose default namespace this cluster has]",
)
@_setting_options
@click.option(
    "--tls-ca",
    type=_FILE,
    help="Authorities, as PEM. With it and the two below clients and the other controllers must"
    " show a certificate that one of them signed, over TLS 1.3. Files may be replaced at any time.",
)
@click.option(
    "--tls-cert", type=_FILE, help="This controller's certificate, made by `streammeta certs`."
)
@click.option("--tls-key", type=_FILE, help="The certificate's key, readable by its owner alone.")
@click.option(
    "--tls-listen",
    metavar="HOST:PORT",
    help="Listen for clients over TLS here, and in plain text where --listen says: while clients"
    " are moved to TLS.",
)
@click.option(
    "--token-listen",
    metavar="HOST:PORT",
    help="Listen here for people's tools that show a token in place of a certificate, over TLS.",
)
@click.option(
    "--token-advertise",
    metavar="HOST:PORT",
    help="Where these tools reach this controller.  [default: --token-listen]",
)
@click.option(
    "--oidc-issuer", default="", metavar="URL", help="Issuer of these tokens, as they name it."
)
@click.option("--oidc-audience", default="", help="Audience that they must be for.")
@click.option(
    "--oidc-keys",
    default="",
    metavar="FILE|URL",
    help="Keys that sign them, as a JSON Web Key Set; a file may be replaced at any time."
    "  [default: those that the issuer publishes]",
)
@click.option("--peer-tls-ca", type=_FILE, help="Other authorities for the other controllers.")
@click.option("--peer-tls-cert", type=_FILE, help="Another certificate for them.")
@click.option("--peer-tls-key", type=_FILE, help="Its key.")
@click.option(
    "--peer-plain-text",
    type=click.Choice([each.value for each in PeerPlainText]),
    callback=lambda *given: PeerPlainText(given[-1]),
    default=PeerPlainText.NONE.value,
    show_default=True,
    help="While controllers are moved to TLS one by one: first all speak plain text and take both,"
    " then all take both, then none.",
)
@click.option(
    "--http-listen",
    metavar="HOST:PORT",
    help="Serve probes and metrics over HTTP here: /livez, /readyz and /metrics.",
)
@click.option(
    "--http-tls-ca", type=_FILE, help="Other authorities for them than --tls-ca, which holds here."
)
@click.option("--http-tls-cert", type=_FILE, help="Another certificate for them.")
@click.option("--http-tls-key", type=_FILE, help="Its key.")
@click.option(
    "--http-plain-text",
    is_flag=True,
    help="Serve them in plain text although there is TLS: for probes that have no certificate.",
)
@click.option(
    "--http-plain-text-pages",
    is_flag=True,
    help="Show the status pages there as well: every caller that reaches the port then reads names"
    " and tags of streams.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow plain text beyond loopback: every caller that reaches a port may do everything.",
)
@click.option(
    "--peer-override",
    default="",
    metavar="ID@HOST:PORT,...",
    help="Where this controller reaches these others, over any address known: for NAT and proxies.",
)
@click.option(
    "--reflection",
    is_flag=True,
    help="Describe the services to callers, as grpcurl asks for.",
)
@tracing_option("commits and calls that come with a trace")
@click.option(
    "--policy",
    type=_FILE,
    help="TOML file that grants roles, denies certificates and gives namespaces of keys to some;"
    " read again when it changes.",
)
@click.option(
    "--audit-log",
    type=_FILE,
    help="Record calls here, as `streammeta audit` reads them; - is standard output.",
)
@click.option(
    "--audit-failure",
    type=click.Choice([each.value for each in AuditFailure]),
    default=AuditFailure.BLOCK_ADMIN.value,
    show_default=True,
    help="Calls to refuse while --audit-log can't be written: those of operators and those that"
    " destroy, all but heartbeats, or none.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
@click.option(
    "--check-config",
    is_flag=True,
    help="Check the options, the data directory and the bucket; change nothing, exit.",
)
def controller(
    *,
    node_id: int,
    cluster_id: str,
    listen: str,
    advertise: str | None,
    peer_listen: str | None,
    peer_advertise: str | None,
    seeds: str,
    data_dir: Path,
    store_uri: str,
    namespace: str | None,
    peer_override: str,
    reflection: bool,
    audit_log: Path | None,
    audit_failure: str,
    log_level: str,
    check_config: bool,
    **settings: Any,
) -> None:
    """Run one controller of a cluster.

    Its data directory names the voters; see `streammeta storage format`. Prints one line starting
    with `ready` on standard output once it serves, logs on standard error. Ends on Ctrl-C or
    SIGTERM after handing over leadership. Credentials of the bucket are taken from
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.

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
            node_id=NodeId(node_id),
            cluster_id=ClusterId(cluster_id),
            listen=listen,
            advertise=advertise or listen,
            peer_listen=peer_listen,
            peer_advertise=peer_advertise or peer_listen,
            seeds=parse_peers("seeds", seeds),
            peer_overrides=parse_peers("peer-override", peer_override),
            tls=_files("tls", settings),
            peer_tls=_files("peer-tls", settings),
            http_tls=_files("http-tls", settings),
            reflection=reflection,
            audit_log=audit_log,
            audit_failure=AuditFailure(audit_failure),
            data_dir=data_dir,
            store_uri=store_uri,
            namespace=namespace or cluster_namespace(cluster_id),
            **settings,  # those whose options have the same names
        )
    except (ConfigError, TlsError) as error:
        raise click.UsageError(str(error)) from error
    # The server brings gRPC, boto3 and numpy along; `--help` need not wait for them.
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

    with exporting_traces("streammeta-controller", wanted=config.tracing):
        run(config)


def _import_structlog() -> None:
    """Import structlog without Rich, which it would import for tracebacks: a tenth of a start."""
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]
