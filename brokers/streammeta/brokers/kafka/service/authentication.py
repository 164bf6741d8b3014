"""SASL/PLAIN authentication of a connection, which precedes every other request.

Owns the requests allowed before authentication, their answers, and the format of PLAIN's message.
Answers match Apache Kafka's: an unsupported mechanism or a wrong password gets an error and ends
the connection. Any other request ends it without an answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from streammeta.brokers.kafka.protocol import wire
from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.service.users import NAME_MAX, PASSWORD_MAX, Users

APIS_BEFORE = frozenset((wire.API_VERSIONS, wire.SASL_HANDSHAKE, wire.SASL_AUTHENTICATE))
"""APIs served before authentication. Others are not parsed, because lists in them cost time."""

MECHANISM = "PLAIN"
FAILURE_DELAY_S = 0.1
"""Delay before a wrong password is answered, in seconds."""


class AuthenticationFailedError(Exception):
    """The connection must be closed, after sending `answer` if it is set."""

    def __init__(self, reason: str, answer: wire.Tree | None = None) -> None:
        super().__init__(reason)
        self.answer = answer


@dataclass
class Authentication:
    """Authentication of one connection. `user` is its name once it is authenticated."""

    users: Users
    user: str | None = None
    _handshake: int | None = field(default=None, init=False)

    @property
    def expects_bare_token(self) -> bool:
        """Whether the next frame is a bare token without a request header (handshake version 0)."""
        return self._handshake == 0

    async def answer(self, request: wire.Request) -> wire.Tree:
        """Answer a request. Raises `AuthenticationFailedError`, `MalformedRequestError`."""
        if self._handshake is None:
            if request.api_key == wire.API_VERSIONS:
                return wire.api_versions(request)
            if request.api_key == wire.SASL_HANDSHAKE:
                return self._shake(request)
        elif request.api_key == wire.SASL_AUTHENTICATE:
            try:
                await self.verify_token(request.body.auth_bytes)
            except AuthenticationFailedError as error:
                # The answer does not say whether the user exists.
                raise AuthenticationFailedError(str(error), _authentication_failure()) from None
            return {"error_code": Code.NONE, "error_message": None, "auth_bytes": b""}
        raise wire.MalformedRequestError(
            f"API {request.api_key} is not served before authentication"
        )

    def _shake(self, request: wire.Request) -> wire.Tree:
        if request.body.mechanism != MECHANISM:
            code = Code.UNSUPPORTED_SASL_MECHANISM
            raise AuthenticationFailedError(
                "the mechanism is not supported. Use PLAIN", _handshake_answer(code)
            )
        # The version decides how the client sends its token: 0 without a request around it.
        self._handshake = request.version
        return _handshake_answer(Code.NONE)

    async def verify_token(self, token: bytes) -> None:
        """Verify a client's token.

        A wrong one raises `AuthenticationFailedError` after a delay of `FAILURE_DELAY_S`.
        """
        parts = read_plain(token)
        if parts is None or not await self.users.verify_password(*parts):
            # The delay limits how fast one connection can guess passwords.
            await asyncio.sleep(FAILURE_DELAY_S)
            raise AuthenticationFailedError("wrong user name or password")
        self.user = parts[0]


def read_plain(token: bytes) -> tuple[str, str] | None:
    """Return name and password of PLAIN's message, None for anything else (RFC 4616).

    A user may not act for another one: the authorization identity is empty, or the user's own name.
    """
    try:
        acting_as, name, password = token.decode("utf-8").split("\0")
    except ValueError:
        return None
    if acting_as not in ("", name) or not name or not password:
        return None
    # A longer password would only cost hashing time.
    if len(name.encode()) > NAME_MAX or len(password.encode()) > PASSWORD_MAX:
        return None
    return name, password


async def reject_authentication(request: wire.Request) -> wire.Tree:
    """Reject authentication requests on a connection that does not expect any."""
    if request.api_key == wire.SASL_HANDSHAKE:
        return {"error_code": Code.ILLEGAL_SASL_STATE, "mechanisms": ()}
    message = "this connection does not expect authentication now"
    code = Code.ILLEGAL_SASL_STATE
    return {"error_code": code, "error_message": message, "auth_bytes": b""}


def _handshake_answer(code: Code) -> wire.Tree:
    return {"error_code": code, "mechanisms": (MECHANISM,)}


def _authentication_failure() -> wire.Tree:
    return {
        "error_code": Code.SASL_AUTHENTICATION_FAILED,
        "error_message": "Authentication failed: Invalid username or password",
        "auth_bytes": b"",
    }
