"""Access to fields of a request that only some callers of the method may set.

Values and trims of a commit are calls by themselves otherwise, and a hold of deletions affects the
whole cluster.
"""

from __future__ import annotations

from streammeta.controller.trust.authenticator import Caller
from streammeta.controller.trust.namespaces import require_namespaces
from streammeta.rpc.methods import facts_of


def require_fields(caller: Caller, method: str, request: object) -> None:
    """Require that a caller may set all fields of a request, and use its keys.

    `method` is the short name, e.g. `ObjectService.CommitPipeline`.

    Raises:
        RoleLacksCallError: the caller's role may not set one of the fields.
        NotYourNamespaceError: the caller may not use one of the namespaces.
    """
    for field, roles in facts_of(method).access.roles_of_fields.items():
        if getattr(request, field):
            caller.require_any(roles, f"{method} with {field}")
    require_namespaces(caller, request)
