"""Origin of this installation of streammeta, and the command that adds an extra to it."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "streammeta"


def install_command(extra: str) -> str:
    """Give the command line that installs `extra` (a table name of pyproject.toml) beside it.

    Works as printed: with this interpreter's pip, and from the checkout or archive that this copy
    came from (PEP 610); from the package index when the copy came from there.
    """
    return f"{shlex.quote(sys.executable)} -m pip install {_requirement(extra)}"


def _requirement(extra: str) -> str:
    origin = _direct_url()
    url = str(origin.get("url", ""))
    if "dir_info" not in origin:
        source = f" @ {url}" if url else ""
        return shlex.quote(f"{DISTRIBUTION}[{extra}]{source}")
    checkout = Path(unquote(urlsplit(url).path))
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return editable + shlex.quote(f"{checkout}[{extra}]")


def _direct_url() -> dict[str, dict[str, bool]]:
    """Return what PEP 610 keeps of a copy that is not from an index, else nothing."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    return json.loads(text) if text else {}
