"""Options of every command that connects: controllers, files for TLS, a profile, a time limit.

An option counts before its variable in the environment, and that before the profile. Files for TLS
are judged before anything connects; an error names what gave the file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import click

from streammeta.cli.framework.client import DEADLINE_S, Command, ControllerClient
from streammeta.cli.framework.profiles import (
    FILE_KEYS,
    TLS_KEYS,
    Profile,
    ProfileError,
    profiles_path,
    read_profiles,
)
from streammeta.controller.config import ConfigError, check_endpoint
from streammeta.tls.files import CallerFiles, TlsError, TlsFiles, TokenFiles, tls_files


class Endpoints(Enum):
    """Treatment of a call that names no controller by `--connect`."""

    REQUIRED = auto()
    """Those of the profile; without any it is refused."""
    ONE = auto()
    """That of the profile, if it is a single one; several are refused."""
    OPTIONAL = auto()
    """Those of the profile, or none."""
    KNOWN = auto()
    """Those of a profile that `--profile` names; else the command knows some by itself."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Controllers to connect to, HOST:PORT, and files for TLS; None: in plain text."""

    endpoints: tuple[str, ...] | None
    tls: CallerFiles | None


def parse_endpoints(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    """Read HOST:PORT,HOST:PORT... for an option `--connect`; click's callback. None stays None."""
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
    Endpoints.REQUIRED: "Some controllers of the cluster; the leader is found from there."
    "  [default: those of the profile]",
    Endpoints.ONE: "The controller to ask.  [default: that of the profile]",
    Endpoints.OPTIONAL: "Ask the leader, found from these controllers.",
    Endpoints.KNOWN: "Controllers.  [default: those of the plan]",
}


def _options(endpoints: Endpoints) -> tuple[Callable[[Command], Command], ...]:
    return (
        click.option(
            "--connect",
            envvar="STREAMMETA_CONNECT",
            show_envvar=True,
            metavar="HOST:PORT[,HOST:PORT...]",
            callback=parse_endpoints,
            help=_CONNECT_HELP[endpoints],
        ),
        click.option(
            "--tls-ca",
            envvar="STREAMMETA_TLS_CA",
            show_envvar=True,
            type=_FILE,
            help="Authority that signs the certificates of this cluster, as PEM. With it and the"
            " two below the command speaks TLS.",
        ),
        click.option(
            "--tls-cert",
            envvar="STREAMMETA_TLS_CERT",
            show_envvar=True,
            type=_FILE,
            help="The caller's certificate, as PEM; its role decides what the command may do.",
        ),
        click.option(
            "--tls-key",
            envvar="STREAMMETA_TLS_KEY",
            show_envvar=True,
            type=_FILE,
            help="The certificate's key, as PEM.",
        ),
        click.option(
            "--token-file",
            envvar="STREAMMETA_TOKEN_FILE",
            show_envvar=True,
            type=_FILE,
            help="In place of certificate and key: a file with the caller's token, for controllers'"
            " --token-listen.",
        ),
        click.option(
            "--profile",
            envvar="STREAMMETA_PROFILE",
            show_envvar=True,
            metavar="NAME",
            help="Take what is not given from this profile; see `streammeta profile --help`."
            "  [default: the file's default; none: no profile]",
        ),
    )


def connecting(endpoints: Endpoints = Endpoints.REQUIRED) -> Callable[[Command], Command]:
    """Return a decorator that adds the options: arguments `connect` and `tls`.

    `connect: tuple[str, ...]` is never empty, and None only if `endpoints` are not required; `tls:
    CallerFiles | None`.
    """

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def run(
            *,
            connect: tuple[str, ...] | None,
            tls_ca: Path | None,
            tls_cert: Path | None,
            tls_key: Path | None,
            token_file: Path | None,
            profile: str | None,
            **others: Any,
        ) -> None:
            given = {
                "tls_ca": tls_ca,
                "tls_cert": tls_cert,
                "tls_key": tls_key,
                "token_file": token_file,
            }
            found = resolve(connect, given, profile, endpoints)
            command(connect=found.endpoints, tls=found.tls, **others)

        with_options: Command = run
        for option in reversed(_options(endpoints)):
            with_options = option(with_options)
        return with_options

    return decorated


def timeout_option(default_s: float) -> Callable[[Command], Command]:
    """Return a decorator that adds `--timeout`: argument `timeout_s: float`, above 0."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=default_s,
        show_default=True,
        metavar="SECONDS",
        help="Time limit of a call.",
    )


def connection_options(default_s: float = DEADLINE_S) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of `connecting`, and `--timeout`."""
    return lambda command: connecting()(timeout_option(default_s)(command))


def with_client(default_s: float = DEADLINE_S) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of `connection_options`: argument `client`, open."""

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def run(
            *, connect: tuple[str, ...], tls: CallerFiles | None, timeout_s: float, **others: Any
        ) -> None:
            with ControllerClient(connect, timeout_s, tls) as client:
                command(client=client, **others)

        return connection_options(default_s)(run)

    return decorated


def resolve(
    connect: tuple[str, ...] | None,
    given: Mapping[str, Path | None],
    name: str | None,
    endpoints: Endpoints = Endpoints.REQUIRED,
) -> Connection:
    """Return the connection of a call: what is given, and the rest from a profile.

    `given` are the files for TLS by key, such as `tls_ca`; `name` is the profile's, None: the
    default one.

    Raises:
        ProfileError: the profile is of no use.
        TlsError: some files are given and not all, or one is of no use.
        click.UsageError: no controller is named, or several where one is asked.
    """
    path = profiles_path()
    profile = read_profiles(path).choose(name)
    if connect is None and profile is not None:
        is_left_out = endpoints is Endpoints.KNOWN and name is None
        connect = None if is_left_out else profile.endpoints or None
    if connect is None and endpoints in (Endpoints.REQUIRED, Endpoints.ONE):
        raise click.MissingParameter(
            f"Neither is there an endpoint in a profile of {path}.",
            ctx=click.get_current_context(silent=True),
            param_hint="'--connect'",
            param_type="option",
        )
    if endpoints is Endpoints.ONE and connect is not None and len(connect) > 1:
        raise click.UsageError(f"--connect: {','.join(connect)}; must be one controller")
    return Connection(connect, _files(path, given, profile))


def files_of(paths: Mapping[str, Path | None]) -> CallerFiles | None:
    """Return the files for TLS by their keys in a profile; None without any.

    Raises:
        TlsError: some are given and not all, or certificate and token.
    """
    ca, certificate, key = map(paths.get, TLS_KEYS)
    token = paths.get("token_file")
    if token is None:
        return tls_files(ca, certificate, key)
    if certificate is not None or key is not None:
        raise TlsError("token-file: replaces --tls-cert and --tls-key; give one of both")
    if ca is None:
        raise TlsError("tls-ca: not given; a token is shown over TLS alone: give --tls-ca")
    return TokenFiles(ca.absolute(), token.absolute())


def _merged(
    given: Mapping[str, Path | None], of_profile: Mapping[str, Path]
) -> Mapping[str, Path | None]:
    """Return what is given, and the rest from a profile; a token given replaces a certificate."""
    has_token = given.get("token_file") is not None
    has_certificate = any(given[key] is not None for key in ("tls_cert", "tls_key"))
    replaced = {"tls_cert", "tls_key"} if has_token else {"token_file"} if has_certificate else {}
    rest = {key: path for key, path in of_profile.items() if key not in replaced}
    return {key: given.get(key) or rest.get(key) for key in FILE_KEYS}


def _files(
    path: Path, given: Mapping[str, Path | None], profile: Profile | None
) -> CallerFiles | None:
    of_profile = {} if profile is None else profile.files
    try:
        files = files_of(_merged(given, of_profile))
        if files is not None:
            files.load()
    except TlsError as error:
        option, _, rest = str(error).partition(":")
        key = option.replace("-", "_")
        if profile is None or given.get(key) is not None or key not in of_profile:
            raise
        raise ProfileError(f"{path}: profile {profile.name!r}: {key}:{rest}") from error
    if not isinstance(files, TlsFiles):
        return files
    # Executors of Spark run in other folders.
    return TlsFiles(files.ca.absolute(), files.certificate.absolute(), files.key.absolute())
