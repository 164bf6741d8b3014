"""`streammeta profile`: the profiles of this user. Connects to nothing."""

import click

from streammeta.cli.framework.connecting import files_of
from streammeta.cli.framework.output import CommandError, Output, with_output
from streammeta.cli.framework.profiles import FILE_KEYS, profiles_path, read_profiles
from streammeta.tls.files import TlsContents, TlsError


@click.group()
def profile() -> None:
    """Show the profiles that commands connect by.

    They are in ~/.config/streammeta/profiles.toml, or below $XDG_CONFIG_HOME; paths in it are
    relative to its folder. An option counts before its variable in the environment, and that before
    the profile.

    \b
    Example of a file:
      default = "prod"
      [profiles.prod]
      endpoints = ["c1.example.org:9090", "c2.example.org:9090"]
      tls_ca = "prod/ca.pem"
      tls_cert = "prod/admin-alice.pem"
      tls_key = "prod/admin-alice.key"

    In place of tls_cert and tls_key it may have token_file, a file with a token.
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
        (one.name, one.name == profiles.default, ",".join(one.endpoints) or None, bool(one.files))
        for one in profiles.by_name.values()
    ]
    output.rows("profiles", ("name", "default", "endpoints", "tls"), rows)


@profile.command("show")
@click.argument("name", required=False)
@with_output
def show_command(name: str | None, output: Output) -> None:
    """Show a profile, by default the default one, and the principal of its certificate.

    Of a token the issuer knows what it says. Exit 1 if its files are of no use.

    \b
    Example:
      streammeta profile show prod
    """
    profiles = read_profiles(profiles_path())
    chosen = profiles.choose(name)
    if chosen is None:
        raise CommandError(
            "NO_PROFILE",
            f"{profiles.path}: no profile is the default",
            'name one, or write `default = "NAME"` into the file',
        )
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
            "correct the profile, or make new certificates by `streammeta certs`",
        ) from error
    principal = loaded.principal if isinstance(loaded, TlsContents) else None
    output.summary({"identity": principal.uri if principal is not None else None})
