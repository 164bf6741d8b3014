"""`streammeta profile`: the profiles of this user. It connects to no cluster."""

import click

from streammeta.cli.framework.connecting import files_of
from streammeta.cli.framework.output import CommandError, Output, with_output
from streammeta.cli.framework.profiles import FILE_KEYS, profiles_path, read_profiles
from streammeta.tls.files import TlsContents, TlsError


@click.group()
def profile() -> None:
    """Show the profiles that commands connect with.

    They are in ~/.config/streammeta/profiles.toml, or below $XDG_CONFIG_HOME. Paths in the file are
    relative to its folder. The command line has precedence over the environment, and the
    environment over the profile.

    \b
    Example of a file:
      default = "prod"
      [profiles.prod]
      endpoints = ["c1.example.org:9090", "c2.example.org:9090"]
      tls_ca = "prod/ca.pem"
      tls_cert = "prod/admin-alice.pem"
      tls_key = "prod/admin-alice.key"

    A profile may have token_file, a file with a token, instead of tls_cert and tls_key.
    """


@profile.command("list")
@with_output
def list_command(output: Output) -> None:
    """List all profiles.

    \b
    Example:
      streammeta profile list
    """
    profiles = read_profiles(profiles_path())
    output.summary({"file": str(profiles.path)})
    output.note("")
    rows = [
        (
            profile.name,
            profile.name == profiles.default,
            ",".join(profile.endpoints) or None,
            bool(profile.files),
        )
        for profile in profiles.by_name.values()
    ]
    output.rows("profiles", ("name", "default", "endpoints", "tls"), rows)


@profile.command("show")
@click.argument("name", required=False)
@with_output
def show_command(name: str | None, output: Output) -> None:
    """Show a profile, by default the default one, and the principal of its certificate.

    Only the issuer knows the principal of a token. Exit 1 if the files are invalid.

    \b
    Example:
      streammeta profile show prod
    """
    profiles = read_profiles(profiles_path())
    chosen = profiles.choose(name)

    if chosen is None:
        raise CommandError(
            "NO_PROFILE",
            f"{profiles.path}: no default profile",
            'name one, or write `default = "NAME"` into the file',
        )

    # Printed before the files are read, so that their paths are visible if they are invalid.
    output.summary(
        {
            "name": chosen.name,
            "endpoints": ",".join(chosen.endpoints) or None,
            **{key: str(chosen.files[key]) if key in chosen.files else None for key in FILE_KEYS},
        }
    )
    try:
        files = files_of(chosen.files)
        loaded = None if files is None else files.load()
    except TlsError as error:
        raise CommandError(
            "PROFILE",
            f"{profiles.path}: profile {chosen.name!r}: {error}",
            "correct the profile, or create new certificates with `streammeta certs`",
        ) from error

    principal = loaded.principal if isinstance(loaded, TlsContents) else None
    output.summary({"identity": principal.uri if principal is not None else None})
