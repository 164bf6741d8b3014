"""Pages of a bucket's listings: what those of objects, versions and uploads have in common.

They are read straight from the bytes of an answer: botocore's own reading costs some 0.1 ms an
entry. Strict: what is no complete page of its operation is refused, since a key that was dropped
would look like an object that is missing. Does no I/O.
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
"""Pattern of a size in bytes, which 64 bits hold."""

_ERROR = re.compile(rb"\s*(<\?xml[^>]*>)?\s*<Error[\s>]")


@dataclass(frozen=True, slots=True)
class ListingPage(Generic[T]):
    """Entries of a page in the server's order.

    `next_options` are the parameters of the request for the next page; None: it is the last.
    """

    entries: tuple[T, ...]
    next_options: Mapping[str, str] | None


def is_error(body: bytes) -> bool:
    """True if an answer is an error, which S3 may send with the status of success."""
    return _ERROR.match(body) is not None


class PageDocument:
    """The XML document of a page."""

    def __init__(self, body: bytes, root_name: str) -> None:
        """Read the document.

        Raises:
            StoreUnavailableError: the bytes are no whole document.
            StoreRejectedError: the document is of another kind.
        """
        if b"<!DOCTYPE" in body:
            raise refusal("it declares a document type")
        try:
            self._root = ElementTree.fromstring(body)
        except ElementTree.ParseError as error:
            raise StoreUnavailableError(
                f"a page of the listing is no whole XML document ({error}); retry"
            ) from error
        tag = self._root.tag
        if tag.rpartition("}")[2] != root_name:
            raise refusal(f"it is a {tag!r}, wanted {root_name}")
        self._namespace = tag.removesuffix(root_name)
        self._is_encoded = self._text("EncodingType") == "url"

    def entries(self, name: str) -> list[ElementTree.Element]:
        """The entries of a name, in their order."""
        return self._root.findall(self._namespace + name)

    def fields(self, entry: ElementTree.Element, names: Iterable[str]) -> list[str | None]:
        """The texts of an entry's fields; None for those that it has not."""
        return [entry.findtext(self._namespace + name) for name in names]

    def key_of(self, text: str) -> str:
        """The key that the server wrote as `text`: encoded, if the page says so."""
        return unquote_plus(text) if self._is_encoded and ("%" in text or "+" in text) else text

    def next_options(self, options: Mapping[str, str]) -> Mapping[str, str] | None:
        """See `ListingPage`; `options` are the names of the parameters, by those of their fields.

        The first has to be there. Raises `StoreRejectedError` if it is not, or if the page does not
        say whether it is the last.
        """
        truncated = self._text("IsTruncated").strip()
        if truncated not in ("true", "false"):
            raise refusal(f"IsTruncated is {truncated!r}, wanted true or false")
        if truncated == "false":
            return None
        found = {field: self._text(field) for field in options}
        first = next(iter(options))
        if not found[first]:
            raise refusal(f"it is not the last, but has no {first}")
        return {
            options[field]: self.key_of(text) if field == "NextKeyMarker" else text
            for field, text in found.items()
            if text
        }

    def _text(self, field: str) -> str:
        return self._root.findtext(self._namespace + field, "")


def time_ms(moment: str) -> int:
    """Read a time; returns ms since 1970. Raises `StoreRejectedError`."""
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError:
        parsed = _in_another_form(moment)
    if parsed.tzinfo is None:
        raise refusal(f"the time {moment!r} has no zone")
    return to_ms(parsed)


def to_ms(moment: datetime) -> int:
    """Return ms since 1970."""
    return round(moment.timestamp() * 1000)


def _in_another_form(moment: str) -> datetime:
    """Read a time of RFC 5322, which some servers write; of an unknown zone, it has none."""
    try:
        return parsedate_to_datetime(moment)
    except (IndexError, OverflowError, TypeError, ValueError) as error:
        raise refusal(f"{moment!r} is no time") from error


def refusal(problem: str) -> StoreRejectedError:
    """Return the error for a page that is not as it has to be."""
    return StoreRejectedError(
        f"a page of the listing is not as S3 has it: {problem}; this server does not list"
        " correctly, use another one"
    )
