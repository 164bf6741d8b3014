"""Doors of one controller: that of calls and that of pages, under one policy.

Reads the files that doors judge by: the policy, and the keys of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from streammeta.controller.config import ConfigError, ControllerConfig
from streammeta.controller.trust.access_rules import HTTP_RULES, RPC_RULES
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.controller.trust.policy import PolicyError
from streammeta.controller.trust.policy_file import PolicyFile
from streammeta.rpc.method_facts import Access

if TYPE_CHECKING:
    from streammeta.controller.trust.issuer_keys import IssuerKeys


class Doors:
    """Doors that judge by the policy in force."""

    def __init__(self, config: ControllerConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: one is of no use.
        """
        self._clusters = config.known_clusters
        self.policy = _policy_file(config)
        """None: there is none."""
        self.of_calls = self._new(RPC_RULES)
        self.token_keys = _token_keys(config, self.of_calls)
        """Keys that verify tokens of callers; None: tokens are not taken."""

    def of_pages(self) -> Authenticator:
        """Return the door of the listener for HTTP."""
        return self._new(HTTP_RULES)

    def _new(self, rules: Mapping[str, Access]) -> Authenticator:
        if self.policy is None:
            return Authenticator(self._clusters, rules=rules)
        door = Authenticator(self._clusters, self.policy.current, rules)
        self.policy.on_change(door.take)
        return door


def _policy_file(config: ControllerConfig) -> PolicyFile | None:
    if config.policy is None:
        return None
    try:
        return PolicyFile(config.policy, config.cluster_id)
    except PolicyError as error:
        raise ConfigError(f"policy: {error}") from error


def _token_keys(config: ControllerConfig, door: Authenticator) -> IssuerKeys | None:
    """Let callers with tokens in; return the keys that verify these. None: tokens are not taken."""
    if config.token_listen is None:
        return None
    from streammeta.controller.trust.issuer_keys import IssuerKeys, KeysAddress, KeysFile
    from streammeta.controller.trust.tokens import KeysError, TokenVerifier

    given = config.oidc_keys
    is_file = bool(given) and "://" not in given
    source = (
        KeysFile(Path(given), config.tls_reload_ms / 1000)
        if is_file
        else KeysAddress(config.oidc_issuer, given)
    )
    keys = IssuerKeys(source, door.take_keys)
    verifier = TokenVerifier(config.oidc_issuer, config.oidc_audience)
    door.take_tokens(verifier, keys.read_again)
    if is_file:  # an issuer out of reach is no reason not to start
        try:
            keys.take(source.read())
        except KeysError as error:
            raise ConfigError(f"oidc-keys: {error}") from error
    return keys
