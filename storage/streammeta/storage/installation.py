"""Origin of this installation of streammeta, and the extras that bring its optional packages."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from streammeta.storage.errors import MissingPackageError

DISTRIBUTION = "streammeta"

_EXTRA_OF = {
    **dict.fromkeys(("boto3", "botocore"), "s3"),
    **dict.fromkeys(("click", "cryptography", "grpc_health", "prompt_toolkit", "rich"), "cli"),
    **dict.fromkeys(("kio",), "kafka"),
    **dict.fromkeys(("opentelemetry",), "tracing"),
    **dict.fromkeys(("prometheus_client",), "metrics"),
    **dict.fromkeys(("aiohttp", "grpc_reflection", "pyarrow", "structlog", "uvloop"), "controller"),
    **dict.fromkeys(("pandas", "psutil", "py4j", "pyspark"), "reconcile-spark"),
}
"""Extra (a table name of pyproject.toml) by the top-level module that it installs."""


@contextmanager
def optional_packages(purpose: str, extra: str = "") -> Iterator[None]:
    """Turn the absence of an optional package in the body into `MissingPackageError`.

    `purpose` is the subject of the message, such as "an s3:// address". `extra` is the extra to
    install, by default the smallest one with the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        # An unknown module is a bug or a broken installation, so the original error stays.
        if package not in _EXTRA_OF:
            raise
        wanted = extra or _EXTRA_OF[package]
        raise MissingPackageError(purpose, package, wanted, install_command(wanted)) from error


def install_command(extra: str) -> str:
    """Return the command line that adds `extra` (a table name of pyproject.toml).

    The command works as printed. It uses this interpreter's pip and the source of this copy: the
    checkout or archive of PEP 610, or the package index.
    """
    return f"{shlex.quote(sys.executable)} -m pip install {_requirement(extra)}"


def _requirement(extra: str) -> str:
    # Only needed for an error message, while every command loads this module.
    from pathlib import Path
    from urllib.parse import unquote, urlsplit

    origin = _direct_url()
    url = str(origin.get("url", ""))
    # An archive or an index. A checkout has `dir_info`, see PEP 610.
    if "dir_info" not in origin:
        source = f" @ {url}" if url else ""
        return shlex.quote(f"{DISTRIBUTION}[{extra}]{source}")
    checkout = Path(unquote(urlsplit(url).path))
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return editable + shlex.quote(f"{checkout}[{extra}]")


def _direct_url() -> dict[str, dict[str, bool]]:
    """Return the PEP 610 record of a copy that is not from an index, else an empty one."""
    from importlib import metadata  # slow to import; every command loads this module

    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    return json.loads(text) if text else {}
