"""Authentication of a connection by SASL/PLAIN, before it may ask for anything else.

Owns which requests are allowed until then, what they are answered, and the form of PLAIN's message.
Answers and endings are those of Apache Kafka: a mechanism that is not offered and a wrong password
get an error and end the connection, any other request ends it without an answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.protocol.wire import (
    API_VERSIONS,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    MalformedRequestError,
    Request,
    Tree,
    api_versions,
)
from streammeta.brokers.kafka.service.users import NAME_MAX, PASSWORD_MAX, Users

APIS_BEFORE = frozenset((API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE))
"""APIs that are served before authentication. Others are not read: lists in them cost time."""

MECHANISM = "PLAIN"
FAILURE_DELAY_S = 0.1
"""Time that a wrong password waits for its answer."""


class AuthenticationFailedError(Exception):
    """The connection is to be closed, after `answer` if there is one."""

    def __init__(self, reason: str, answer: Tree | None = None) -> None:
        super().__init__(reason)
        self.answer = answer


@dataclass
class Authentication:
    """Authentication of one connection; `user` is its name once that is known."""

    users: Users
    user: str | None = None
    _handshake: int | None = field(default=None, init=False)

    @property
    def takes_bare_tokens(self) -> bool:
        """Whether the next frame is a token without a request around it: handshake version 0."""
        return self._handshake == 0

    async def answer(self, request: Request) -> Tree:
        """Answer a request. Raises `AuthenticationFailedError`, `MalformedRequestError`."""
        if self._handshake is None:
            if request.api_key == API_VERSIONS:
                return api_versions(request)
            if request.api_key == SASL_HANDSHAKE:
                return self._shake(request)
        elif request.api_key == SASL_AUTHENTICATE:
            try:
                await self.take(request.body.auth_bytes)
            except AuthenticationFailedError as error:
                raise AuthenticationFailedError(str(error), _refusal()) from None
            return {"error_code": Code.NONE, "error_message": None, "auth_bytes": b""}
        raise MalformedRequestError(f"API {request.api_key} is not served before authentication")

    def _shake(self, request: Request) -> Tree:
        if request.body.mechanism != MECHANISM:
            code = Code.UNSUPPORTED_SASL_MECHANISM
            raise AuthenticationFailedError("its mechanism is not offered", _shaken(code))
        self._handshake = request.version
        return _shaken(Code.NONE)

    async def take(self, token: bytes) -> None:
        """Take a client's token. Raises `AuthenticationFailedError`, after a while."""
        parts = read_plain(token)
        if parts is None or not await self.users.are(*parts):
            await asyncio.sleep(FAILURE_DELAY_S)
            raise AuthenticationFailedError("it gave no user's name and password")
        self.user = parts[0]


def read_plain(token: bytes) -> tuple[str, str] | None:
    """Return name and password of PLAIN's message, None for anything else (RFC 4616).

    Nobody may act for another: the name to act as is empty, or the user's own.
    """
    try:
        acting_as, name, password = token.decode("utf-8").split("\0")
    except ValueError:
        return None
    if acting_as not in ("", name) or not name or not password:
        return None
    if len(name.encode()) > NAME_MAX or len(password.encode()) > PASSWORD_MAX:
        return None
    return name, password


async def refused_later(request: Request) -> Tree:
    """Answer what comes when there is nothing to authenticate, or no more."""
    if request.api_key == SASL_HANDSHAKE:
        return {"error_code": Code.ILLEGAL_SASL_STATE, "mechanisms": ()}
    message = "this connection takes no authentication now"
    code = Code.ILLEGAL_SASL_STATE
    return {"error_code": code, "error_message": message, "auth_bytes": b""}


def _shaken(code: Code) -> Tree:
    return {"error_code": code, "mechanisms": (MECHANISM,)}


def _refusal() -> Tree:
    return {
        "error_code": Code.SASL_AUTHENTICATION_FAILED,
        "error_message": "Authentication failed: Invalid username or password",
        "auth_bytes": b"",
    }
