"""Rejections of callers: no identity, or an identity without the required access.

They are final: every controller gives the same caller the same answer.
"""

from __future__ import annotations

from streammeta.controller.errors import ApiError


class NoIdentityError(ApiError):
    """The caller showed no identity of this cluster: a certificate, unless stated otherwise."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the certificate of this connection names no caller: {why}")


class BadTokenError(NoIdentityError):
    """A required token is missing or invalid."""

    shown = "token"

    def __init__(self, why: str) -> None:
        ApiError.__init__(self, f"the token of this call names no caller: {why}")


class UnknownKeyError(BadTokenError):
    """A token is signed by a key that its issuer may have begun to use a moment ago."""


class AccessDeniedError(ApiError):
    """A caller has no access. `needs` names the required roles."""

    def __init__(self, principal: str, needs: str, message: str) -> None:
        super().__init__(message)
        self.principal = principal
        self.needs = needs


class RoleLacksCallError(AccessDeniedError):
    """No role of the caller permits the call."""

    def __init__(self, principal: str, call: str, needs: str) -> None:
        super().__init__(principal, needs, f"{principal} may not call {call}: it needs {needs}")


class NotYourNodeError(AccessDeniedError):
    """A broker spoke for a node that is neither its own nor assigned to it."""

    def __init__(self, principal: str, node_id: int, needs: str) -> None:
        super().__init__(
            principal, needs, f"{principal} may not speak for node {node_id}: it needs {needs}"
        )


class NotYourNamespaceError(AccessDeniedError):
    """Keys of this namespace are another's."""

    def __init__(self, principal: str, namespace: str, needs: str) -> None:
        super().__init__(
            principal,
            needs,
            f"{principal} may not use keys of namespace {namespace!r}: it needs {needs}",
        )
