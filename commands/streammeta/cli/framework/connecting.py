"""Options of every command that connects: controllers, TLS files, a profile, a timeout.

The command line has precedence over the environment, and the environment over the profile. TLS
files are validated before the first connection. An error names the source of the file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import click

from streammeta.cli.framework import profiles
from streammeta.cli.framework.client import DEADLINE_S, Command, ControllerClient, add_options
from streammeta.controller.config import ConfigError, check_endpoint
from streammeta.tls.files import CallerFiles, TlsError, TlsFiles, TokenFiles, tls_files


class Endpoints(Enum):
    """Default for a command without `--connect`."""

    REQUIRED = auto()
    """Use the endpoints of the profile. Without any the command fails."""
    ONE = auto()
    """Use the endpoint of the profile if it has a single one. Several are an error."""
    OPTIONAL = auto()
    """Use the endpoints of the profile, or none."""
    KNOWN = auto()
    """Use the endpoints of a profile that `--profile` names. Otherwise the command knows some."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Endpoints of controllers, HOST:PORT, and TLS files. `None` means plain text."""

    endpoints: tuple[str, ...] | None
    tls: CallerFiles | None


def parse_endpoints(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    """Parse HOST:PORT,HOST:PORT... for the option `--connect` for click. None stays None."""
    if value is None:
        return None
    endpoints = tuple(part.strip() for part in value.split(","))
    for endpoint in endpoints:
        try:
            check_endpoint("--connect", endpoint)
        except ConfigError as error:
            raise click.BadParameter(str(error)) from error
    return endpoints


_FILE = click.Path(path_type=Path, dir_okay=False)

_CONNECT_HELP: Mapping[Endpoints, str] = {
    Endpoints.REQUIRED: "Some controllers of the cluster. The command finds the leader from"
    " there. [default: the endpoints of the profile]",
    Endpoints.ONE: "The controller to query. [default: the endpoint of the profile]",
    Endpoints.OPTIONAL: "Query the leader, found from these controllers.",
    Endpoints.KNOWN: "Controllers. [default: the endpoints of the plan]",
}


def _options(endpoints: Endpoints) -> tuple[Callable[[Command], Command], ...]:
    return (
        _option(
            "--connect",
            _CONNECT_HELP[endpoints],
            metavar="HOST:PORT[,HOST:PORT...]",
            callback=parse_endpoints,
        ),
        _option(
            "--tls-ca",
            "CA certificate of the cluster, as PEM. Together with the next two options"
            " it enables TLS.",
            type=_FILE,
        ),
        _option(
            "--tls-cert",
            "Certificate of the caller, as PEM. Its role decides which calls the command may make.",
            type=_FILE,
        ),
        _option("--tls-key", "Private key of the certificate, as PEM.", type=_FILE),
        _option(
            "--token-file",
            "File with a bearer token, instead of certificate and key, for the"
            " controllers' --token-listen.",
            type=_FILE,
        ),
        _option(
            "--profile",
            "Profile for all options that are not set. See `streammeta profile --help`."
            " [default: the file's default. None: no profile]",
            metavar="NAME",
        ),
    )


def _option(name: str, text: str, **more: Any) -> Callable[[Command], Command]:
    """Return an option with a variable of the same name for all commands, STREAMMETA_TLS_CA."""
    variable = f"STREAMMETA_{name.removeprefix('--').replace('-', '_').upper()}"
    return click.option(name, envvar=variable, show_envvar=True, help=text, **more)


def connecting(endpoints: Endpoints = Endpoints.REQUIRED) -> Callable[[Command], Command]:
    """Return a decorator that adds the options: arguments `connect` and `tls`.

    `connect: tuple[str, ...]` is never empty. It is None only if `endpoints` are optional. `tls` is
    `CallerFiles | None`.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(*, connect: tuple[str, ...] | None, profile: str | None, **others: Any) -> None:
            # The command sees one resolved connection, never the options that it comes from.
            given = {key: others.pop(key) for key in profiles.FILE_KEYS}
            found = resolve(connect, given, profile, endpoints)
            command(connect=found.endpoints, tls=found.tls, **others)

        return add_options(*_options(endpoints))(run)

    return decorate


def timeout_option(default_s: float) -> Callable[[Command], Command]:
    """Return a decorator that adds `--timeout`: argument `timeout_s: float`, above 0."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=default_s,
        metavar="SECONDS",
        help="Timeout of a call.",
    )


def connection_options(default_s: float = DEADLINE_S) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of `connecting`, and `--timeout`."""
    return lambda command: connecting()(timeout_option(default_s)(command))


def with_client(default_s: float = DEADLINE_S) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of `connection_options`: argument `client`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(
            *, connect: tuple[str, ...], tls: CallerFiles | None, timeout_s: float, **others: Any
        ) -> None:
            with ControllerClient(connect, timeout_s, tls) as client:
                command(client=client, **others)

        return connection_options(default_s)(run)

    return decorate


def resolve(
    connect: tuple[str, ...] | None,
    given: Mapping[str, Path | None],
    name: str | None,
    endpoints: Endpoints = Endpoints.REQUIRED,
) -> Connection:
    """Return the connection of a call: the given options, completed from a profile.

    `given` are the TLS files by key, such as `tls_ca`. `name` is the name of the profile, None for
    the default.

    Raises:
        ProfileError: the profile is invalid.
        TlsError: only some of the files are given, or a file is invalid.
        click.UsageError: no controller is named, or several where the command needs one.
    """
    path = profiles.profiles_path()
    # An unknown --profile fails even if every option is given: it is a typing error.
    profile = profiles.read_profiles(path).choose(name)
    if connect is None and profile is not None:
        # A command that knows endpoints from its plan must not be led to the default profile's
        # cluster.
        is_left_out = endpoints is Endpoints.KNOWN and name is None
        connect = None if is_left_out else profile.endpoints or None
    if connect is None and endpoints in (Endpoints.REQUIRED, Endpoints.ONE):
        raise click.MissingParameter(
            f"The profiles in {path} have no endpoint either.",
            ctx=click.get_current_context(silent=True),
            param_hint="'--connect'",
            param_type="option",
        )

    # These commands ask one controller about itself, so a search for the leader would mislead.
    if endpoints is Endpoints.ONE and connect is not None and len(connect) > 1:
        raise click.UsageError(f"--connect: {','.join(connect)}; name one controller")
    return Connection(connect, _files(path, given, profile))


def files_of(paths: Mapping[str, Path | None]) -> CallerFiles | None:
    """Return the TLS files by their keys in a profile, None without any.

    Raises:
        TlsError: only some are given, or both certificate and token.
    """
    ca, certificate, key = map(paths.get, profiles.TLS_KEYS)
    token = paths.get("token_file")
    if token is None:
        return tls_files(ca, certificate, key)
    # One certificate or one token: with both, the caller's identity would depend on the port.
    if certificate is not None or key is not None:
        raise TlsError("token-file: replaces --tls-cert and --tls-key. Use one of both")
    if ca is None:
        raise TlsError("tls-ca: missing; a token is only sent over TLS, so set --tls-ca")
    return TokenFiles(ca.absolute(), token.absolute())


def take_tls_files(option: str, settings: dict[str, Any]) -> TlsFiles | None:
    """Remove the three options of a set of TLS files from `settings` and return them."""
    name = option.replace("-", "_")
    ca, certificate, key = (settings.pop(f"{name}_{part}") for part in ("ca", "cert", "key"))
    return tls_files(ca, certificate, key, option)


def _merge(
    given: Mapping[str, Path | None], of_profile: Mapping[str, Path]
) -> Mapping[str, Path | None]:
    """Return the given files, completed from a profile. A given token replaces a certificate."""
    has_token = given.get("token_file") is not None
    # The command line replaces the kind of credential as a whole, never a half of it.
    has_certificate = any(given[key] is not None for key in ("tls_cert", "tls_key"))
    replaced = {"tls_cert", "tls_key"} if has_token else {"token_file"} if has_certificate else {}
    rest = {key: path for key, path in of_profile.items() if key not in replaced}
    return {key: given.get(key) or rest.get(key) for key in profiles.FILE_KEYS}


def _files(
    path: Path, given: Mapping[str, Path | None], profile: profiles.Profile | None
) -> CallerFiles | None:
    of_profile = {} if profile is None else profile.files
    try:
        files = files_of(_merge(given, of_profile))
        # Validate before the first connection, where a bad file only appears as a failed handshake.
        if files is not None:
            files.load()
    except TlsError as error:
        # Messages begin with the option's name. Translate it to the profile's key if it came from
        # there.
        option, _, rest = str(error).partition(":")
        key = option.replace("-", "_")
        if profile is None or given.get(key) is not None or key not in of_profile:
            raise
        raise profiles.ProfileError(f"{path}: profile {profile.name!r}: {key}:{rest}") from error

    if not isinstance(files, TlsFiles):
        return files
    # Executors of Spark run in other folders.
    return TlsFiles(files.ca.absolute(), files.certificate.absolute(), files.key.absolute())
