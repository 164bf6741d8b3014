"""Chromium without a window, driven over its debugging protocol: pages as browsers show them.

Needs no package: aiohttp speaks to the browser. `tests.kit.tools` tells where it is.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.kit.tools import program

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *(
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
    ),
)


class Tab:
    """One page of the browser; collects errors and the hosts of requests."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self.hosts: set[str] = set()

    async def listen(self) -> None:
        """Take messages of the browser until it ends."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._waiting.pop(told["id"]).set_result(told)
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.hosts.add(urlsplit(params["request"]["url"]).netloc)

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol; return its result."""
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await asyncio.wait_for(answer, 60)
        assert "error" not in told, told
        return told["result"]

    async def open(
        self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light"
    ) -> None:
        """Go to a page, on a screen of this width and with this color scheme."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return told["result"].get("value")

    async def until(self, expression: str, what: str, timeout_s: float = 60) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.value(expression):  # noqa: ASYNC110 - the browser tells of none
                    await asyncio.sleep(0.1)
        except TimeoutError:
            shown = await self.value("document.body.innerText")
            raise AssertionError(f"not so after {timeout_s} s: {what}; shown:\n{shown}") from None

    async def press(self, key: str) -> None:
        """Press a key, such as Tab."""
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9}[key]
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code
            )

    async def picture(self, path: Path) -> None:
        """Write what is shown as PNG."""
        told = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))  # noqa: ASYNC240 - nothing else runs


@asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Tab]:
    """Start the browser with a profile of its own in an empty folder; give its one page."""
    found_program = program(*PROGRAMS)
    assert found_program is not None
    process = await asyncio.create_subprocess_exec(
        found_program,
        *_FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_CONFIG_HOME": str(profile), "XDG_CACHE_HOME": str(profile)},
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while not (found := re.search(rb"ws://(\S+?)/", await process.stderr.readline())):
                assert process.returncode is None, "the browser has ended"
        draining = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1].decode()}/json/list") as listed:
                pages = [page for page in await listed.json() if page["type"] == "page"]
            async with session.ws_connect(
                pages[0]["webSocketDebuggerUrl"], max_msg_size=0
            ) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                try:
                    yield tab
                finally:
                    listening.cancel()
        draining.cancel()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
