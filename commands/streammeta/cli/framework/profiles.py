"""Profiles: the clusters that commands connect to, by name, in a file of the user.

    default = "prod"

    [profiles.prod]
    endpoints = ["c1.example.org:9090", "c2.example.org:9090"]
    tls_ca = "prod/ca.pem"
    tls_cert = "prod/admin-alice.pem"
    tls_key = "prod/admin-alice.key"

A profile may have `token_file`, a file with a token, instead of `tls_cert` and `tls_key`. Paths are
relative to the folder of the file. Every error names the file, the profile and the key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streammeta.controller.config import ConfigError, check_endpoint
from streammeta.storage.parsing import parse_toml

NO_PROFILE = "none"
"""Name that selects no profile, not even the default."""

TLS_KEYS = ("tls_ca", "tls_cert", "tls_key")
TOKEN_KEYS = ("tls_ca", "token_file")
FILE_KEYS = (*TLS_KEYS, "token_file")
_KEYS = ("endpoints", *FILE_KEYS)
_TOP_KEYS = ("default", "profiles")


class ProfileError(Exception):
    """The file of profiles, or a profile in it, is invalid."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One cluster: HOST:PORT of some controllers, and paths of TLS files by key."""

    name: str
    endpoints: tuple[str, ...] = ()
    files: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Profiles:
    """Profiles of a file, empty if it does not exist. `default` is a name, or empty."""

    path: Path
    by_name: Mapping[str, Profile] = field(default_factory=dict)
    default: str = ""

    def choose(self, name: str | None) -> Profile | None:
        """Return the profile of this name, the default one for None, none for `NO_PROFILE`.

        Raises:
            ProfileError: no profile has this name.
        """
        # --profile none overrides a default profile.
        if name == NO_PROFILE or (name is None and not self.default):
            return None
        wanted = self.default if name is None else name
        if wanted not in self.by_name:
            raise ProfileError(f"{self.path}: no profile {wanted!r}. {self._list_known()}")
        return self.by_name[wanted]

    def _list_known(self) -> str:
        names = ", ".join(self.by_name)
        return f"it has {names}" if names else "it is missing or has no profile"


def profiles_path() -> Path:
    """Return the path of the file, whether it exists or not."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    # A relative path is invalid by the XDG specification, and to be ignored.
    folder = base if base.is_absolute() else Path.home() / ".config"
    return folder / "streammeta" / "profiles.toml"


def read_profiles(path: Path) -> Profiles:
    """Read all profiles. Reject unknown keys.

    Raises:
        ProfileError: the file is unreadable or does not contain profiles.
    """
    try:
        content = parse_toml(path.read_text())
    # Most users have no profiles. A missing file is an empty one.
    except FileNotFoundError:
        return Profiles(path)
    except OSError as error:
        raise ProfileError(f"{path}: can't read it: {error.strerror}") from error
    except ValueError as error:
        raise ProfileError(f"{path}: not TOML: {error}") from error

    # A misspelt key would otherwise be ignored without a sign.
    _reject_unknown(str(path), content, _TOP_KEYS)
    tables = content.get("profiles", {})
    if not isinstance(tables, dict):
        raise ProfileError(f"{path}: profiles: must be tables [profiles.NAME]")
    by_name = {name: _profile(path, name, table) for name, table in tables.items()}
    default = content.get("default", "")

    if not isinstance(default, str) or (default and default not in by_name):
        raise ProfileError(
            f"{path}: default: {default!r}, must be one of: {', '.join(by_name) or 'none exists'}"
        )

    return Profiles(path, by_name, default)


def _profile(path: Path, name: str, table: Any) -> Profile:
    where = f"{path}: profile {name!r}"
    # The name is reserved, or --profile none would mean two things.
    if name == NO_PROFILE:
        raise ProfileError(f"{where}: means no profile. Choose another name")
    if not isinstance(table, dict):
        raise ProfileError(f"{where}: must be a table [profiles.{name}]")
    _reject_unknown(where, table, _KEYS)
    files = {key: _file(path, where, key, table[key]) for key in FILE_KEYS if key in table}
    if "token_file" in files and len(files) > len(TOKEN_KEYS):
        raise ProfileError(f"{where}: token_file: replaces tls_cert and tls_key. Use one of both")
    needed = TOKEN_KEYS if "token_file" in files else TLS_KEYS

    # Checked here and not at the first connection, so that the message names the profile.
    if files and len(files) < len(needed):
        missing = next(key for key in needed if key not in files)
        raise ProfileError(f"{where}: {missing}: missing; set {', '.join(needed)}, or none")
    return Profile(name, _endpoints(where, table.get("endpoints", [])), files)


def _reject_unknown(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise ProfileError(f"{where}: {key}: unknown, must be one of {', '.join(known)}")


def _endpoints(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ProfileError(f'{where}: endpoints: {value!r}, must be a list of "HOST:PORT"')
    for endpoint in value:
        try:
            check_endpoint("endpoints", endpoint)
        except ConfigError as error:
            raise ProfileError(f"{where}: {error}") from error
    return tuple(value)


def _file(path: Path, where: str, key: str, value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise ProfileError(f"{where}: {key}: {value!r}, must be the path of a file")
    # Relative to the file, so that a profile works in every folder. `~` is expanded as in a shell.
    return path.parent / Path(value).expanduser()
