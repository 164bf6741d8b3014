"""Durations and sizes as operators write them: 30s, 5m, 200MiB."""

import re

import click

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNITS_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Duration(click.ParamType[int]):
    """A duration such as 30m; its value is in milliseconds."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read it. A default that is a number already stays."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+)(ms|s|m|h|d)", str(value))
        if found is None:
            self.fail(f"{value!r} is no duration; wanted e.g. 90s, 30m, 12h or 3d", param, ctx)
        return int(found[1]) * _UNITS_MS[found[2]]


class ByteCount(click.ParamType[int]):
    """A number of bytes such as 200MiB."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read it. A default that is a number already stays."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+)(B|KiB|MiB|GiB)", str(value))
        if found is None:
            self.fail(f"{value!r} is no size; wanted e.g. 512KiB, 200MiB or 4GiB", param, ctx)
        return int(found[1]) * _UNITS_BYTES[found[2]]
