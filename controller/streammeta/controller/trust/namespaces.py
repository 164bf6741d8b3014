"""Parts of a request that only some callers of its method may set: fields, and namespaces of keys.

Values and trims of a commit are calls by themselves otherwise, and a hold of deletions affects the
whole cluster. Namespaces are granted by the policy's prefixes, or by a role. Reads are bound as
writes are. Copies of all metadata, snapshots and watches, show all keys.
"""

from __future__ import annotations

from collections.abc import Iterable

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.metadata.api import requests
from streammeta.controller.trust.audit.lines import NAMESPACE
from streammeta.controller.trust.authenticator import NAMESPACE_OF, Caller
from streammeta.controller.trust.refusals import NotYourNamespaceError
from streammeta.rpc.methods import facts_of
from streammeta.tls.identity import Role


def require_namespaces(caller: Caller, request: object) -> None:
    """Require that a caller may use the namespaces of a request's keys.

    Raises:
        NotYourNamespaceError: it may not use one of them.
        InvalidRequestError: it would change anchors of audit logs, which no caller may.
    """
    # Before the exemption of admins: anchors exist to show what an administrator has removed.
    _refuse_anchors(request)
    if caller.principal is None or Role.ADMIN in caller.roles:
        return
    of_roles = {NAMESPACE_OF[role] for role in caller.allowed_by if role in NAMESPACE_OF}
    for namespace in _namespaces(request):
        if namespace in of_roles:
            continue
        # All roles that allow the call are bound to their own namespace.
        if caller.allowed_by <= NAMESPACE_OF.keys():
            raise NotYourNamespaceError(caller.name, namespace, "role admin or broker")
        owners = caller.policy.owners_of(namespace)
        if owners is None or any(owner.covers(caller.principal) for owner in owners):
            continue
        names = [f"{owner.role}/{owner.name}" for owner in owners]
        raise NotYourNamespaceError(caller.name, namespace, " or ".join((*names, "role admin")))


def _refuse_anchors(request: object) -> None:
    is_read = isinstance(request, requests.GetKVs | requests.ListKVs)
    if not is_read and NAMESPACE in _namespaces(request):
        raise InvalidRequestError(
            "namespace", f"{NAMESPACE!r} can only be changed by controllers, use another one"
        )


def _namespaces(request: object) -> Iterable[str]:
    # In the order of the request, so that every repeat names the same namespace in its error.
    match request:
        case requests.PutKVs():
            return dict.fromkeys(item.namespace for item in request.items)
        case requests.CommitStreamSetObject() | requests.CommitStreamObject():
            return dict.fromkeys(item.namespace for item in request.kv_puts)
        case requests.CommitNamedObjects():
            return dict.fromkeys(
                item.owner_key.namespace for item in request.objects if item.owner_key
            )
        case requests.DeleteNamedObjects():
            # Names are in a namespace of the product, and deletable by every broker. The owner's
            # key is not.
            return (request.owner_key.namespace,) if request.owner_key else ()
        case requests.GetKVs() | requests.DeleteKVs():
            return dict.fromkeys(key.namespace for key in request.keys)
        case requests.ListKVs() if not request.namespaces:
            return (request.namespace,)
        case _:
            return ()


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
