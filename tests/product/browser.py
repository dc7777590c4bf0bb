"""A headless Chromium, driven over the W3C WebDriver protocol."""

import contextlib
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")

MISSING = "needs Chromium: apt-get install chromium chromium-driver"

_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TAB, ENTER = "\ue004", "\ue007"
"""Keys, as WebDriver names them."""

_SECONDS = 60.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Browser:
    """One window."""

    def __init__(self, session: str) -> None:
        """``session`` is the address of a WebDriver session."""
        self._session = session

    def open(self, url: str) -> None:
        _call("POST", f"{self._session}/url", {"url": url})

    def size(self, width: int) -> None:
        """Set the width of the window in pixels."""
        _call("POST", f"{self._session}/window/rect", {"width": width, "height": 900})

    def scheme(self, name: str) -> None:
        """Show pages as for a system with the ``light`` or the ``dark`` scheme."""
        media = {"features": [{"name": "prefers-color-scheme", "value": name}]}
        command = {"cmd": "Emulation.setEmulatedMedia", "params": media}
        _call("POST", f"{self._session}/goog/cdp/execute", command)

    def press(self, key: str) -> None:
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        keyboard = {"type": "key", "id": "keyboard", "actions": actions}
        _call("POST", f"{self._session}/actions", {"actions": [keyboard]})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of an async function in the page and return its result. The arguments are ``given``."""
        wrapped = (
            "const given = [...arguments], done = given.pop();"
            f"(async () => {{ {script} }})().then(done, error => done({{failed: String(error)}}));"
        )
        return _call("POST", f"{self._session}/execute/async", {"script": wrapped, "args": list(arguments)})


@contextlib.contextmanager
def browser(folder: Path, rules: str) -> Iterator[Browser]:
    """Start Chromium with an empty profile. ``rules`` are its ``--host-resolver-rules``."""
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            assert driver.stdout is not None
            said = next(
                filter(None, (re.search(r"started successfully on port (\d+)", line) for line in driver.stdout))
            )
            arguments = [*_ARGUMENTS, f"--user-data-dir={folder}", f"--host-resolver-rules={rules}"]
            options = {"binary": CHROMIUM, "args": arguments}
            wanted = {"alwaysMatch": {"goog:chromeOptions": options, "timeouts": {"script": int(_SECONDS * 1000)}}}
            server = f"http://127.0.0.1:{said[1]}"
            session = f"{server}/session/{_call('POST', f'{server}/session', {'capabilities': wanted})['sessionId']}"
            try:
                yield Browser(session)
            finally:
                _call("DELETE", session)
        finally:
            driver.terminate()
            driver.wait(_SECONDS)


def _call(method: str, url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)  # noqa: S310
    with _direct.open(request, timeout=_SECONDS) as response:
        return json.load(response)["value"]
