"""Base of the client's errors."""

from __future__ import annotations

from typing import ClassVar


class BrokerClientError(Exception):
    """Base class of the client's errors: catch it to handle every failure."""

    retriable: ClassVar[bool] = False
