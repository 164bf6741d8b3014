"""First lines of a controller's log: its version, its settings without secrets, and a warning."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib import metadata

import structlog

from streammeta.controller.config import ControllerConfig
from streammeta.storage.installation import DISTRIBUTION
from streammeta.storage.object_store.protocol.address import without_secrets
from streammeta.storage.private_files import advise_private

_log = structlog.get_logger(component="server")


def log_start(config: ControllerConfig) -> None:
    """Log version and settings, the store's address without its secrets, and open files."""
    settings = asdict(config)
    # Logged as fields of their own, below.
    del settings["node_id"], settings["cluster_id"]
    # Logs are shipped to systems with other readers than the secrets.
    settings["store_uri"] = without_secrets(config.store_uri)
    settings["backup_store"] = config.backup_store and without_secrets(config.backup_store)
    # Paths have no form in JSON.
    settings["data_dir"] = str(config.data_dir)
    settings["audit_log"] = config.audit_log and str(config.audit_log)
    settings["policy"] = config.policy and str(config.policy)
    for name in ("tls", "peer_tls", "http_tls"):
        if settings[name] is not None:
            settings[name] = {part: str(path) for part, path in settings[name].items()}

    _log.info(
        "controller_starting",
        version=metadata.version(DISTRIBUTION),
        pid=os.getpid(),
        node_id=config.node_id,
        cluster_id=config.cluster_id,
        settings=settings,
    )
    if config.backup_store and config.backup_keep_ms > config.delete_delay_ms:
        _log.warning(
            "backup_outlives_objects",
            backup_keep_ms=config.backup_keep_ms,
            delete_delay_ms=config.delete_delay_ms,
            advice="a restore to a point before --delete-delay-ms loses records that were trimmed "
            "or deleted since. Raise --delete-delay-ms to keep their objects longer",
        )

    _warn_of_open_files(config)


def _warn_of_open_files(config: ControllerConfig) -> None:
    """Log which of the controller's data other users of this machine can read."""
    for path in (config.data_dir, config.audit_log):
        if path is not None and (cure := advise_private(path)) is not None:
            _log.warning("data_open_to_others", path=str(path), cure=cure)
