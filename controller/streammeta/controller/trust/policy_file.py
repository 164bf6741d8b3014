"""Policy file: read at start, and again whenever its content has changed.

An invalid file ends a start. Later the policy in force stays, and the error is logged once per
content.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from streammeta.controller.trust.policy import Policy, PolicyError, parse_policy

_log = structlog.get_logger(component="trust")

LOOK_INTERVAL_S = 5.0
"""Time between two looks at the file, in seconds."""


class PolicyFile:
    """The policy in force, as its file says or last said."""

    def __init__(self, path: Path, cluster_id: str) -> None:
        """Read the file.

        Raises:
            PolicyError: it can't be read, or states no policy.
        """
        self._path = path
        self._cluster_id = cluster_id
        self._refused: str | None = None
        self._listeners: list[Callable[[Policy], None]] = []
        self.told: Callable[[str, str, Mapping[str, str]], None] | None = None
        """Hears of each policy that came into force, or was refused and why."""
        self._asked = asyncio.Event()
        self._text = _read(path)
        self.current = parse_policy(self._text, cluster_id, str(path))
        """The policy in force."""
        self.loaded_ms = _now_ms()
        """When it came into force, in milliseconds since 1970."""
        _log.info("policy_loaded", file=str(path), sha256=self.current.digest)

    def on_change(self, listener: Callable[[Policy], None]) -> None:
        """Call `listener` with each policy that comes into force from now on."""
        self._listeners.append(listener)

    def look_now(self) -> None:
        """Let `run` look at once."""
        self._asked.set()

    async def run(self) -> None:
        """Look at the file time and again, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            self.take(await asyncio.to_thread(_read_or_tell, self._path))

    def take(self, text: str | PolicyError) -> None:
        """Bring the policy of a text into force, if it is another and good."""
        if text == self._text:
            # The file is back to the policy in force. The same wrong content would be news again.
            self._refused = None
            return

        try:
            if isinstance(text, PolicyError):
                raise text
            policy = parse_policy(text, self._cluster_id, str(self._path))
        except PolicyError as error:
            self._refuse(str(error), str(text))
            return
        except Exception as error:  # noqa: BLE001 - every controller reads the file; none may end
            self._refuse(f"{self._path}: {type(error).__name__}: {error}; report it", str(text))
            return

        assert isinstance(text, str)
        self._text, self._refused, self.current = text, None, policy
        self.loaded_ms = _now_ms()
        _log.info("policy_loaded", file=str(self._path), sha256=policy.digest)
        # Recorded before the listeners end calls that the new policy rejects.
        self._tell("")
        for listener in self._listeners:
            listener(policy)

    def _refuse(self, why: str, content: str) -> None:
        if content != self._refused:
            _log.error("policy_refused", reason=why, in_force=self.current.digest)
            self._tell(why)
        self._refused = content

    def _tell(self, reason: str) -> None:
        if self.told is not None:
            in_force = {"file": str(self._path), "sha256": self.current.digest}
            self.told("policy.reload", reason, in_force)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: can't be read: {error}. It must be a TOML file") from None


def _read_or_tell(path: Path) -> str | PolicyError:
    try:
        return _read(path)
    except PolicyError as error:
        return error
