"""`streammeta certs`: certificates for controllers, brokers and users.

It connects to no controller and works on files only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from streammeta.cli.framework.client import add_options
from streammeta.cli.framework.output import CommandError, Output, with_output
from streammeta.tls import identity

_COLUMNS = (
    *("file", "identity", "hosts", "from", "until", "days_left", "serial", "sha256", "problems"),
)
_ANY_LIFE = click.IntRange(1, 3650)


@click.group()
def certs() -> None:
    """Create certificates for controllers, brokers and users, and show existing ones.

    An authority of two files signs them. Its certificate, ca.pem, is needed wherever a certificate
    is checked. Keep its key only where certificates are created.

    \b
    Example:
      streammeta certs ca --dir certs --ca-key private/ca.key
      streammeta certs controller --id 3 --cluster-id demo --host c3.example.org \\
        --dir certs --ca-key private/ca.key
    """


_dir_option = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("certs"),
    help="Folder of the certificates, including ca.pem.",
)
_ca_key_option = click.option(
    "--ca-key",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Key of the authority, in another folder, because certificates are copied to other"
    " machines.",
)


_leaf_options = add_options(
    _ca_key_option,
    _dir_option,
    click.option("--days", type=_ANY_LIFE, default=90, help="Days until it expires."),
    click.option(
        "--host",
        "hosts",
        multiple=True,
        metavar="NAME|IP",
        help="Name or address at which others connect to the holder. Repeatable.",
    ),
    click.option("--cluster-id", required=True, help="Cluster for which the certificate is valid."),
)
"""Adds the options of every command that signs a certificate."""


@certs.command("ca")
@_dir_option
@_ca_key_option
@click.option("--name", default="streammeta", help="Name for people.")
@click.option("--days", type=_ANY_LIFE, default=3650, help="Days until it expires.")
@with_output
def ca_command(*, folder: Path, ca_key: Path, name: str, days: int, output: Output) -> None:
    """Create the authority that signs the other certificates.

    \b
    Example:
      streammeta certs ca --dir certs --ca-key private/ca.key
    """
    # Resolved, so that links and relative paths do not hide a common folder.
    if folder.resolve() == ca_key.parent.resolve():
        raise click.UsageError(
            f"--ca-key: {ca_key} is in the folder of the certificates, --dir. Choose a folder"
            " that is not copied to other machines"
        )
    # cryptography loads slowly.
    from streammeta.cli.security import certificate_authority as authority

    files = authority.IssuedFiles(folder / "ca.pem", ca_key)
    with _explain():
        authority.create_authority(files, name, days)
    output.summary({"certificate": str(files.certificate), "key": str(files.key)})


@certs.command("controller")
@click.option("--id", "node_id", type=int, required=True, help="The controller's --node-id.")
@_leaf_options
@with_output
def controller_command(*, node_id: int, hosts: Sequence[str], **options: Any) -> None:
    """Create a controller's certificate. It needs a --host for each of its names.

    \b
    Example:
      streammeta certs controller --id 3 --cluster-id demo --host c3.example.org \\
        --host 10.0.0.3 --dir certs --ca-key private/ca.key
    """
    if not hosts:
        raise click.UsageError(
            "--host: missing; name each host and address of the --advertise options"
        )
    _issue(identity.Role.CONTROLLER, str(node_id), hosts=hosts, **options)


@certs.command("broker")
@click.option(
    "--id",
    "name",
    required=True,
    help=f"Node id of the broker, or {identity.NEW_BROKER!r} for a broker that has none yet.",
)
@_leaf_options
@with_output
def broker_command(*, name: str, **options: Any) -> None:
    """Create a broker's certificate.

    \b
    Example:
      streammeta certs broker --id 1007 --cluster-id demo --dir certs --ca-key private/ca.key
    """
    _issue(identity.Role.BROKER, name, **options)


@certs.command("user")
@click.option(
    "--role",
    type=click.Choice([role.value for role in identity.USER_ROLES]),
    required=True,
    help="Role, which decides the allowed calls.",
)
@click.option("--name", required=True, help="Name of the person or job.")
@_leaf_options
@with_output
def user_command(*, role: str, name: str, **options: Any) -> None:
    """Create the certificate of a person or a job.

    \b
    Example:
      streammeta certs user --role admin --name alice --cluster-id demo \\
        --dir certs --ca-key private/ca.key
    """
    _issue(identity.Role(role), name, **options)


def _issue(
    role: identity.Role,
    name: str,
    *,
    cluster_id: str,
    hosts: Sequence[str],
    days: int,
    folder: Path,
    ca_key: Path,
    output: Output,
) -> None:
    try:
        principal = identity.Principal(cluster_id, role, name)
    except identity.IdentityError as error:
        raise click.UsageError(str(error)) from error
    from streammeta.cli.security import certificate_authority as authority

    stem = f"{role}-{name}"
    files = authority.IssuedFiles(folder / f"{stem}.pem", folder / f"{stem}.key")
    with _explain():
        signer = authority.Authority(authority.IssuedFiles(folder / "ca.pem", ca_key))
        signer.issue(files, principal, hosts, days)
    output.summary(
        {"identity": principal.uri, "certificate": str(files.certificate), "key": str(files.key)}
    )


@certs.command("show")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--ca",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Authority that must have signed them.",
)
@with_output
def show_command(*, files: Sequence[Path], ca: Path | None, output: Output) -> None:
    """Show the contents of certificates. Exit 1 if one of them is invalid.

    The key of a certificate, in a file of the same name that ends with .key, must belong to it and
    be readable by its owner only.

    \b
    Example:
      streammeta certs show certs/*.pem --ca certs/ca.pem
    """
    from streammeta.tls.certificates import describe, read_certificates, read_key

    now = datetime.now(UTC)
    with _explain():
        authorities = read_certificates(ca) if ca is not None else ()
        shown = []
        for path in files:
            key = path.with_suffix(".key")
            # The first certificate of a file is the holder's. Its authorities may follow.
            facts = describe(
                read_certificates(path)[0],
                now,
                authorities=authorities,
                key=read_key(key) if key.exists() else None,
            )
            shown.append((path, facts))
    rows = [
        (
            str(path),
            str(facts.principal or ("authority" if facts.is_authority else "")),
            " ".join(facts.hosts),
            f"{facts.not_before:%Y-%m-%d}",
            f"{facts.not_after:%Y-%m-%d}",
            facts.days_left(now),
            facts.serial,
            facts.fingerprint,
            "; ".join(facts.problems),
        )
        for path, facts in shown
    ]
    # Printed before the failure, with the problems of each.
    output.rows("certificates", _COLUMNS, rows)
    wrong = [path for path, facts in shown if facts.problems]
    if wrong:
        raise CommandError(
            "CERTIFICATE",
            f"{len(wrong)} invalid certificates: {', '.join(map(str, wrong))}",
            "create new ones with `streammeta certs`",
        )


@contextmanager
def _explain() -> Iterator[None]:
    from streammeta.tls.certificates import CertificateError

    try:
        yield
    except CertificateError as error:
        raise CommandError("CERTIFICATE", str(error), "nothing was changed") from error
