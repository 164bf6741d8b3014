"""Templates of the status pages. Every value is escaped, because callers choose tags freely."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from streammeta.controller.monitoring.http.http_listener import Page

HTML = "text/html; charset=utf-8"

STATIC: Mapping[str, tuple[str, int]] = {
    "uplot-1.6.32.js": ("text/javascript; charset=utf-8", 86_400),
    "uplot-1.6.32.css": ("text/css; charset=utf-8", 86_400),
    "page.js": ("text/javascript; charset=utf-8", 60),
    "page.css": ("text/css; charset=utf-8", 60),
    "icon.svg": ("image/svg+xml", 86_400),
}
"""Static files of pages: content type, and seconds for which a browser may cache them."""


NOTHING = "\u2013"
"""Placeholder for a missing value."""


class Link(NamedTuple):
    """A table cell with a link."""

    text: object
    path: str


def new_environment() -> Environment:
    """Return the templates."""
    made = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        # A misspelled field fails in the tests and does not show as an empty cell.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["utc"] = utc
    made.filters["cell"] = cell
    return made


def static_page(name: str) -> Page:
    """Return a file of `STATIC`."""
    # Only listed names reach the file system, never a path of a caller.
    kind, kept_s = STATIC[name]
    body = resources.files(__package__).joinpath("static", name).read_bytes()
    return Page(body, content_type=kind, kept_s=kept_s)


def utc(time_s: float) -> str:
    """Format a time, in seconds since 1970."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def cell(value: Any) -> str | Markup:
    """Format a value of a table, escaped."""
    match value:
        case None | "":
            return NOTHING
        # Before int, because a bool is an int.
        case bool():
            return "yes" if value else "no"
        case int():
            return grouped(value)
        case Link(text, path):
            # Markup.format escapes its arguments, as the text of a link is from callers too.
            return Markup('<a href="{}">{}</a>').format(path, cell(text))
        case dict():
            return escape(", ".join(f"{key}={field}" for key, field in value.items()) or NOTHING)
        case _:
            return escape(value)


def grouped(number: int) -> str:
    """Format a number in groups of three digits."""
    # A narrow space cannot be mistaken for a decimal point in any locale.
    return f"{number:,}".replace(",", "\u202f")


def in_bytes(size: float) -> str:
    """Format a size in bytes."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(int(math.log(size, 1024)), len(units) - 1) if size >= 1 else 0
    return f"{size / 1024**power:.{min(power, 1)}f} {units[power]}"


def as_id(number: int | None) -> str | None:
    """Format an id, without groups of digits."""
    return None if number is None else str(number)


def in_age(age_ms: int | None) -> str | None:
    """Format the age of an event, None if it is unknown."""
    if age_ms is None:
        return None
    seconds = age_ms // 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        # From two units on, so that rounding hides less than half of the value.
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def in_ms(value: float | None) -> str:
    """Format milliseconds."""
    return NOTHING if value is None else f"{value:.1f} ms"
