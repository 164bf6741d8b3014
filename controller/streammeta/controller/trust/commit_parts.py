"""Parts of commits that are calls of their own otherwise: values to put, streams to trim.

Whoever may not make the call may not send the part, whatever else its role may commit.
"""

from __future__ import annotations

from streammeta.controller.metadata.api import requests
from streammeta.controller.trust.authenticator import Caller
from streammeta.controller.trust.method_rules import RULES
from streammeta.controller.trust.namespaces import require_namespaces


def require_parts(caller: Caller, request: object) -> None:
    """Require that a caller may send all parts of a request, and use its keys.

    Raises:
        RoleLacksCallError: its role may not put values, or may not trim streams.
        NotYourNamespaceError: it may not use one of the namespaces.
    """
    if isinstance(request, requests.CommitStreamSetObject | requests.CommitStreamObject):
        if request.kv_puts:
            _require_call(caller, "KVService.PutKVs", "kv_puts")
        if request.trims:
            _require_call(caller, "StreamService.TrimStreams", "trims")
    require_namespaces(caller, request)


def _require_call(caller: Caller, call: str, field: str) -> None:
    caller.require_any(RULES[f"streammeta.v1.{call}"].roles, f"{call}, as {field} of a commit")
