"""Authenticators of one controller, for RPCs and for HTTP, under one policy.

Reads the policy and the keys of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from streammeta.controller.config import ConfigError, ControllerConfig
from streammeta.controller.trust.authenticator import HTTP_RULES, RPC_RULES, Authenticator
from streammeta.controller.trust.policy import PolicyError
from streammeta.controller.trust.policy_file import PolicyFile
from streammeta.rpc.method_facts import Access

if TYPE_CHECKING:
    from streammeta.controller.trust.issuer_keys import IssuerKeys


def rpc_authenticator(
    config: ControllerConfig, policy: PolicyFile | None
) -> tuple[Authenticator, IssuerKeys | None]:
    """Return the authenticator of RPCs, and the keys that verify callers' tokens.

    The keys are None if tokens are not accepted.

    Raises:
        ConfigError: the file of the keys is invalid.
    """
    authenticator = _new(config, policy, RPC_RULES)
    return authenticator, _token_keys(config, authenticator)


def http_authenticator(config: ControllerConfig, policy: PolicyFile | None) -> Authenticator:
    """Return the authenticator of the HTTP listener."""
    return _new(config, policy, HTTP_RULES)


def _new(
    config: ControllerConfig, policy: PolicyFile | None, rules: Mapping[str, Access]
) -> Authenticator:
    if policy is None:
        return Authenticator(config.known_clusters, rules=rules)
    authenticator = Authenticator(config.known_clusters, policy.current, rules)
    policy.on_change(authenticator.use_policy)
    return authenticator


def read_policy(config: ControllerConfig) -> PolicyFile | None:
    """Return the policy file, None if none is configured.

    Raises:
        ConfigError: the file is invalid.
    """
    if config.policy is None:
        return None
    try:
        return PolicyFile(config.policy, config.cluster_id)
    except PolicyError as error:
        raise ConfigError(f"policy: {error}") from error


def _token_keys(config: ControllerConfig, authenticator: Authenticator) -> IssuerKeys | None:
    """Accept callers with tokens and return the keys that verify them, None without a listener."""
    if config.token_listen is None:
        return None
    from streammeta.controller.trust.issuer_keys import IssuerKeys, KeysAddress, KeysFile
    from streammeta.controller.trust.tokens import KeysError, TokenVerifier

    given = config.oidc_keys
    # A path has no scheme. An empty setting means the address that the issuer publishes.
    is_file = bool(given) and "://" not in given
    source = (
        KeysFile(Path(given), config.tls_reload_ms / 1000)
        if is_file
        else KeysAddress(config.oidc_issuer, given)
    )
    keys = IssuerKeys(source, authenticator.use_keys)
    verifier = TokenVerifier(config.oidc_issuer, config.oidc_audience)
    authenticator.accept_tokens(verifier, keys.read_again)
    # A controller starts although the issuer can't be reached; a file is validated now.
    if is_file:
        try:
            keys.take(source.read())
        except KeysError as error:
            raise ConfigError(f"oidc-keys: {error}") from error
    return keys
