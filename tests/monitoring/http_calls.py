"""Requests to a listener for HTTP, over TLS or in plain text."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from contextlib import closing

from streammeta.tls.files import TlsFiles


def get(
    endpoint: str,
    path: str,
    tls: TlsFiles | None = None,
    method: str = "GET",
    *,
    source: str = "",
) -> tuple[int, str]:
    """Return status and body of an answer to a request, from the host `source` if given.

    Raises:
        OSError, HTTPException: there is none; the connection was refused or ended.
    """
    if tls is None:
        made = http.client.HTTPConnection(endpoint, timeout=60, source_address=(source, 0))
    else:
        context = tls.load().context(ssl.PROTOCOL_TLS_CLIENT)
        made = http.client.HTTPSConnection(
            endpoint, timeout=60, source_address=(source, 0), context=context
        )
    with closing(made) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


async def got(
    endpoint: str, path: str, tls: TlsFiles | None = None, method: str = "GET"
) -> tuple[int, str]:
    """Return what `get` does, while this event loop serves."""
    return await asyncio.to_thread(get, endpoint, path, tls, method)


def samples(text: str) -> dict[str, float]:
    """Return the values in a text of metrics, by name and labels as they are written there."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
