"""Files for TLS at one place, and the ways in which they come to be replaced."""

from __future__ import annotations

import shutil
from pathlib import Path

from streammeta.tls.files import TlsFiles

WAYS = ("renamed", "copied", "linked")


class Placed:
    """A folder with the files of one user; `files` are those."""

    def __init__(self, folder: Path, first: TlsFiles, ca: bytes | None = None) -> None:
        self._folder = folder
        self._number = 0
        folder.mkdir()
        self.files = TlsFiles(*(folder / name for name in ("ca.pem", "own.pem", "own.key")))
        self.place(first, ca)

    def place(self, source: TlsFiles, ca: bytes | None = None, way: str = "renamed") -> None:
        """Put other files in the place of those that are there, in one of `WAYS`."""
        self._number += 1
        behind = self._folder / str(self._number)
        behind.mkdir()
        shutil.copyfile(source.ca, behind / "ca.pem")
        if ca is not None:
            (behind / "ca.pem").write_bytes(ca)
        shutil.copyfile(source.certificate, behind / "own.pem")
        shutil.copyfile(source.key, behind / "own.key")
        (behind / "own.key").chmod(0o600)
        for path in (self.files.ca, self.files.certificate, self.files.key):
            self._replace(behind / path.name, path, way)

    def _replace(self, new: Path, path: Path, way: str) -> None:
        beside = path.with_suffix(".new")
        if way == "copied":
            path.write_bytes(new.read_bytes())
        elif way == "linked":
            beside.symlink_to(new)
            beside.replace(path)
        else:
            shutil.copy(new, beside)
            beside.replace(path)
