"""Advice for a caller whose call failed for want of the right certificate.

Names the options of commands, or the arguments of the library. Knows the refusals of controllers
and the words in which gRPC tells of a failed TLS handshake; under TLS 1.3 a client that was refused
hears no reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

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

# gRPC reports these failures by their text only.
_BY_WORDS: Mapping[str, str] = {
    "WRONG_VERSION_NUMBER": "the port speaks plain text: give the one that speaks TLS, or no files "
    "for TLS",
    "Hostname Verification Check failed": "the controller's certificate names other hosts: connect "
    "to one of these, or make it one with this name by `streammeta certs controller --host`",
    "CERTIFICATE_VERIFY_FAILED": "the controller's certificate is not of the authority in --tls-ca "
    "or not valid now: give this cluster's authority; `streammeta certs show` tells what is wrong "
    "with a certificate",
}
_CLOSED_WORDS = ("Socket closed", "Connection reset")
"""gRPC's words for a connection that the other side has ended."""

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

    if any(words in failure.message for words in _CLOSED_WORDS):
        return _CLOSED_OVER_TLS if over_tls else _CLOSED_IN_PLAIN_TEXT

    return ""


_PROGRAMS_BY_WORDS: Mapping[str, str] = {
    "WRONG_VERSION_NUMBER": "the port speaks plain text: give the one that speaks TLS, or leave "
    "the argument tls out",
    "Hostname Verification Check failed": "the controller's certificate names other hosts: "
    "connect to one of these",
    "CERTIFICATE_VERIFY_FAILED": "the controller's certificate is not of the authority in tls.ca, "
    "or not valid now",
}
_PROGRAM_CLOSED_OVER_TLS = (
    "a controller that refuses a certificate closes the connection: `streammeta certs show` tells "
    "what is wrong with one, and the controller's log names the reason"
)
_PROGRAM_CLOSED_IN_PLAIN_TEXT = (
    "the connection was closed at once: if the controllers demand TLS, give "
    "tls=TlsFiles(ca, certificate, key); else check that these endpoints are theirs"
)


def connection_advice(failures: Collection[str], *, over_tls: bool) -> str:
    """Return what a program can do whose connections fail, empty if TLS is not in question.

    `failures` are the last failure at each endpoint.
    """
    for words, sentence in _PROGRAMS_BY_WORDS.items():
        if any(words in failure for failure in failures):
            return sentence
    # A single closed connection may be a restart. If all are closed, TLS is the likely cause.
    if failures and all(any(words in one for words in _CLOSED_WORDS) for one in failures):
        return _PROGRAM_CLOSED_OVER_TLS if over_tls else _PROGRAM_CLOSED_IN_PLAIN_TEXT
    return ""
