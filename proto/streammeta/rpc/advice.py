"""Advice for a caller whose call failed because of its certificate.

Names the options of commands, or the arguments of the library. It knows the errors of controllers
and gRPC's wording for a failed TLS handshake. Under TLS 1.3 a rejected client learns no reason.
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
    "WRONG_VERSION_NUMBER": "the port uses plain text: use the TLS port, or no TLS files",
    "Hostname Verification Check failed": "the controller's certificate names other hosts:"
    " connect to one of these, or issue one for this"
    " name with `streammeta certs controller --host`",
    "CERTIFICATE_VERIFY_FAILED": "the controller's certificate was not signed by --tls-ca or"
    " is not valid now: use the CA of this cluster. `streammeta"
    " certs show` shows the problems of a certificate",
}
_CLOSED_WORDS = ("Socket closed", "Connection reset")
"""gRPC's wording for a connection that the other side has closed."""

_CLOSED_OVER_TLS = (
    "a controller that rejects a certificate closes the connection: `streammeta certs show"
    " FILE --ca CA` shows the problems of a certificate"
)
_CLOSED_IN_PLAIN_TEXT = f"if the controllers require TLS, set {_FILES}"


def is_refusal(failure: RpcFailure) -> bool:
    """Return whether a controller rejected the caller, as all controllers of its cluster would."""
    return failure.reason in _REFUSALS


def advice(failure: RpcFailure, *, over_tls: bool) -> str:
    """Return the caller's next step as one sentence, empty if certificates are not the cause.

    `over_tls` states whether the call used TLS files.
    """
    if is_refusal(failure):
        if failure.metadata.get("shown") == "token":
            return (
                "nothing was changed. Get a new token from this cluster's issuer, for --token-file"
            )
        needs = failure.metadata.get("needs", "")
        if not needs:
            return f"nothing was changed. Use a certificate of this cluster: {_FILES}"
        if failure.metadata.get("principal", "").startswith("user/"):
            return f"nothing was changed. This needs {needs}, which the policy grants to users"
        return f"nothing was changed. This needs {needs}: use such a certificate: {_FILES}"

    for words, sentence in _BY_WORDS.items():
        if words in failure.message:
            return sentence

    if any(words in failure.message for words in _CLOSED_WORDS):
        return _CLOSED_OVER_TLS if over_tls else _CLOSED_IN_PLAIN_TEXT

    return ""


_PROGRAMS_BY_WORDS: Mapping[str, str] = {
    "WRONG_VERSION_NUMBER": "the port uses plain text: use the TLS port, or omit the argument tls",
    "Hostname Verification Check failed": "the controller's certificate names other hosts: "
    "connect to one of these",
    "CERTIFICATE_VERIFY_FAILED": "the controller's certificate was not signed by a CA in"
    " tls.ca, or is not valid now",
}
_PROGRAM_CLOSED_OVER_TLS = (
    "a controller that rejects a certificate closes the connection: `streammeta certs show`"
    " shows the problems of a certificate, and the controller's log contains the reason"
)
_PROGRAM_CLOSED_IN_PLAIN_TEXT = (
    "the connection was closed at once: if the controllers require TLS, pass"
    " tls=TlsFiles(ca, certificate, key). Otherwise check that these endpoints belong to"
    " controllers"
)


def connection_advice(failures: Collection[str], *, over_tls: bool) -> str:
    """Return the next step of a program whose connections fail, empty if TLS is not the cause.

    `failures` are the last failure at each endpoint.
    """
    for words, sentence in _PROGRAMS_BY_WORDS.items():
        if any(words in failure for failure in failures):
            return sentence
    # A single closed connection may be a restart. If all are closed, TLS is the likely cause.
    if failures and all(any(words in failure for words in _CLOSED_WORDS) for failure in failures):
        return _PROGRAM_CLOSED_OVER_TLS if over_tls else _PROGRAM_CLOSED_IN_PLAIN_TEXT
    return ""
