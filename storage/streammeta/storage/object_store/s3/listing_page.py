"""Common parts of listing pages: objects, versions and uploads.

Pages are decoded from the bytes of a response, because botocore's parser takes about 0.1 ms per
entry. Decoding is strict and rejects any incomplete page, because a dropped key would look like a
missing object. Does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Generic, TypeVar
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from streammeta.storage.errors import StoreRejectedError, StoreUnavailableError

T = TypeVar("T")

SIZE = "[0-9]{1,18}"
"""Pattern of a size in bytes that fits 64 bits."""

# S3 starts a slow response with 200 and may find out later that it has to send an error.
_ERROR = re.compile(rb"\s*(<\?xml[^>]*>)?\s*<Error[\s>]")


@dataclass(frozen=True, slots=True)
class ListingPage(Generic[T]):
    """Entries of a page in the server's order.

    `next_options` are the request parameters of the next page, or None for the last page.
    """

    entries: tuple[T, ...]
    next_options: Mapping[str, str] | None


def is_error(body: bytes) -> bool:
    """Return whether a response is an error, which S3 may send with a success status."""
    return _ERROR.match(body) is not None


class PageDocument:
    """XML document of a page."""

    def __init__(self, body: bytes, root_name: str) -> None:
        """Parse the document.

        Raises:
            StoreUnavailableError: the bytes are not a complete document.
            StoreRejectedError: the document has another root element.
        """
        # Entities of a document type can expand to any size.
        if b"<!DOCTYPE" in body:
            raise invalid_page("it declares a document type")
        try:
            self._root = ElementTree.fromstring(body)
        except ElementTree.ParseError as error:
            raise StoreUnavailableError(
                f"page of the listing is not a complete XML document ({error}). Retry"
            ) from error
        tag = self._root.tag
        if tag.rpartition("}")[2] != root_name:
            raise invalid_page(f"it is a {tag!r}, expected {root_name}")
        self._namespace = tag.removesuffix(root_name)
        self._is_encoded = self._text("EncodingType") == "url"

    def entries(self, name: str) -> list[ElementTree.Element]:
        """Return the elements with a name, in their order."""
        return self._root.findall(self._namespace + name)

    def fields(self, entry: ElementTree.Element, names: Iterable[str]) -> list[str | None]:
        """Return the texts of an entry's fields, None for missing ones."""
        return [entry.findtext(self._namespace + name) for name in names]

    def key_of(self, text: str) -> str:
        """Return the key for `text`, which is URL-encoded if the page says so."""
        # Most keys need no decoding, and the check is cheaper than the call.
        return unquote_plus(text) if self._is_encoded and ("%" in text or "+" in text) else text

    def next_options(self, options: Mapping[str, str]) -> Mapping[str, str] | None:
        """Return the options of the next page, see `ListingPage`.

        `options` maps fields to parameter names. The first field is required. Raises
        `StoreRejectedError` if it is missing, or if the page does not say whether it is the last.
        """
        truncated = self._text("IsTruncated").strip()
        # A page that ends early without saying so would hide keys, and reconciliation would report
        # their objects as missing. So the flag is required instead of assumed.
        if truncated not in ("true", "false"):
            raise invalid_page(f"IsTruncated is {truncated!r}, expected true or false")
        if truncated == "false":
            return None
        found = {field: self._text(field) for field in options}
        first = next(iter(options))
        if not found[first]:
            raise invalid_page(f"it is not the last page, but {first} is missing")
        return {
            # Only key markers are URL-encoded. Tokens and upload ids are opaque and go back
            # unchanged.
            options[field]: self.key_of(text) if field == "NextKeyMarker" else text
            for field, text in found.items()
            if text
        }

    def _text(self, field: str) -> str:
        return self._root.findtext(self._namespace + field, "")


def time_ms(moment: str) -> int:
    """Parse a time into ms since 1970. Raises `StoreRejectedError`."""
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError:
        parsed = _parse_rfc5322(moment)
    # The machine's zone would be a guess, off by hours, and grace periods depend on these times.
    if parsed.tzinfo is None:
        raise invalid_page(f"the time {moment!r} has no zone")
    return to_ms(parsed)


def to_ms(moment: datetime) -> int:
    """Convert a time to ms since 1970."""
    return round(moment.timestamp() * 1000)


def _parse_rfc5322(moment: str) -> datetime:
    """Parse a time of RFC 5322, which some servers write. An unknown zone gives no zone."""
    try:
        return parsedate_to_datetime(moment)
    except (IndexError, OverflowError, TypeError, ValueError) as error:
        raise invalid_page(f"{moment!r} is not a time") from error


def invalid_page(problem: str) -> StoreRejectedError:
    """Return the error for an invalid page."""
    return StoreRejectedError(
        f"page of the listing differs from S3's format: {problem}. Use another server: this one"
        " does not list correctly"
    )
