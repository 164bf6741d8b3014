"""Advice for a caller whose call failed for want of the right certificate.

Names the options of commands. Knows the refusals of controllers and the words in which gRPC tells
of a failed TLS handshake; under TLS 1.3 a client that was refused hears no reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from streammeta.rpc.failures import Reason, RpcFailure

_FILES = "--tls-ca, --tls-cert and --tls-key, or --profile"

_REFUSALS = frozenset(
    {
        Reason.NO_IDENTITY,
        Reason.ROLE_LACKS_CALL,
        Reason.NOT_YOUR_NODE,
        Reason.NOT_YOUR_NAMESPACE,
    }
)

_BY_WORDS: Mapping[str, str] = {
    "WRONG_VERSION_NUMBER": "the port speaks plain text: give the one that speaks TLS, or no files "
    "for TLS",
    "Hostname Verification Check failed": "the controller's certificate names other hosts: connect "
    "to one of these, or make it one with this name by `streammeta certs controller --host`",
    "CERTIFICATE_VERIFY_FAILED": "the controller's certificate is not of the authority in --tls-ca "
    "or not valid now: give this cluster's authority; `streammeta certs show` tells what is wrong "
    "with a certificate",
}
_CLOSED = "Socket closed"
_CLOSED_OVER_TLS = (
    "a controller that refuses a certificate closes the connection: `streammeta certs show FILE "
    "--ca CA` tells what is wrong with a certificate"
)
_CLOSED_IN_PLAIN_TEXT = f"if the controllers demand TLS, give {_FILES}"


def is_refusal(failure: RpcFailure) -> bool:
    """Whether a controller refused the caller, as all others of its cluster would."""
    return failure.reason in _REFUSALS


def advice(failure: RpcFailure, *, over_tls: bool) -> str:
    """Return what a caller can do, as one sentence; empty if no certificate is in question.

    `over_tls` tells whether the call was made with files for TLS.
    """
    if is_refusal(failure):
        if failure.metadata.get("shown") == "token":
            return "nothing was changed; get a new token of this cluster's issuer, for --token-file"
        needs = failure.metadata.get("needs", "")
        if not needs:
            return f"nothing was changed; give a certificate of this cluster, by {_FILES}"
        if failure.metadata.get("principal", "").startswith("user/"):
            return f"nothing was changed; this needs {needs}, which the policy gives to users"
        return f"nothing was changed; this needs {needs}: give such a certificate, by {_FILES}"
    for words, sentence in _BY_WORDS.items():
        if words in failure.message:
            return sentence
    if _CLOSED in failure.message:
        return _CLOSED_OVER_TLS if over_tls else _CLOSED_IN_PLAIN_TEXT
    return ""
