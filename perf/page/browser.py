"""A real headless Chromium, driven by chromedriver's HTTP protocol (W3C WebDriver)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

ENTER, ESCAPE, TAB, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue008"
LEFT, RIGHT, DOWN = "\ue012", "\ue014", "\ue015"

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_TRIES = 5
_PORT = re.compile(r"started successfully on port (\d+)")
_ARGUMENTS = [
    "--headless=new",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--no-first-run",
    "--window-size=1280,860",
    # No proxy of the machine is asked for loopback addresses.
    "--no-proxy-server",
]
_TIMEOUT_S = 120
_WAIT_S = 60


class BrowserError(Exception):
    """The browser could not do what a test asked for; the message begins with WebDriver's error code."""


class TooLateError(AssertionError):
    """What was waited for did not happen in time."""


class Browser:
    """One window of one browser."""

    def __init__(self, base: str) -> None:
        """Set up; `base` is the URL of the session."""
        self._base = base

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call WebDriver; return the value of its answer."""
        return _call(method, self._base + path, body)

    def open(self, url: str) -> None:
        """Load a page and wait for it."""
        self.call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page; return its result, a promise's too."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def find(self, css: str) -> str:
        """The element; waits until it is there.

        Raises:
            TooLateError: it does not come.
        """
        found: list[str] = []

        def is_there() -> bool:
            found[:] = [
                each[_ELEMENT]
                for each in self.call("POST", "/elements", {"using": "css selector", "value": css})
            ]
            return bool(found)

        _eventually(is_there)
        return found[0]

    def click(self, css: str) -> None:
        """Click an element as a mouse does: it has to be in sight, with nothing above it."""
        _eventually(lambda: self._can_click(css))

    def _can_click(self, css: str) -> bool:
        try:
            self.call("POST", f"/element/{self.find(css)}/click", {})
        except BrowserError as error:
            if str(error).startswith(("element click intercepted", "element not interactable", "stale")):
                return False
            raise
        return True

    def keys(self, text: str) -> None:
        """Press keys, wherever the focus is; SHIFT before a key holds for that key."""
        actions = []
        is_shifted = False
        for key in text:
            actions.append({"type": "keyDown", "value": key})
            if key == SHIFT:
                is_shifted = True
                continue
            actions.append({"type": "keyUp", "value": key})
            if is_shifted:
                actions.append({"type": "keyUp", "value": SHIFT})
                is_shifted = False
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def type(self, css: str, text: str) -> None:
        """Click a field and type."""
        self.click(css)
        self.keys(text)

    def text(self, css: str) -> str:
        """The text that an element shows."""
        return str(self.call("GET", f"/element/{self.find(css)}/text"))

    def label(self, css: str) -> str:
        """The accessible name of an element."""
        return str(self.call("GET", f"/element/{self.find(css)}/computedlabel"))

    def count(self, css: str) -> int:
        """The number of elements."""
        return int(self.run("return document.querySelectorAll(arguments[0]).length", css))

    def wait(self, script: str, *arguments: Any) -> None:
        """Wait until an expression is true in the page.

        Raises:
            TooLateError: it does not become true.
        """
        _eventually(lambda: bool(self.run(f"return Boolean({script})", *arguments)))

    def console(self) -> list[str]:
        """What the console got since the last call: failed scripts, refusals of the policy and others."""
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]

    def devtools(self, command: str, **parameters: Any) -> Any:
        """Give a command of the Chrome DevTools protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme: str) -> None:
        """Prefer "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.devtools("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self.call("GET", "/screenshot"))


def missing() -> str:
    """Why there is no browser; "" if there is one."""
    if shutil.which("chromedriver") is None:
        return "no chromedriver on PATH (Debian: apt-get install chromium chromium-driver)"
    if not any(shutil.which(name) for name in ("chromium", "google-chrome", "chrome")):
        return "no chromium on PATH (Debian: apt-get install chromium chromium-driver)"
    return ""


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    """Start a browser, and end it."""
    driver, port = _driver()
    with driver:
        try:
            with _session(f"http://127.0.0.1:{port}") as browser:
                yield browser
        finally:
            driver.terminate()


def _driver() -> tuple[subprocess.Popen[str], int]:
    """Start a driver; return its process and port.

    It takes a free port of IPv4, and ends if that of IPv6 with the same number is not free.
    """
    for _ in range(_TRIES):
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if (port := _port_of(driver)) is not None:
            return driver, port
        driver.wait()
    raise BrowserError("chromedriver ended")


@contextlib.contextmanager
def _session(base: str) -> Iterator[Browser]:
    arguments = [*_ARGUMENTS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    asked = {
        "browserName": "chrome",
        "goog:chromeOptions": {"args": arguments},
        "goog:loggingPrefs": {"browser": "ALL"},
        "unhandledPromptBehavior": "ignore",
    }
    made = _call("POST", f"{base}/session", {"capabilities": {"alwaysMatch": asked}})
    session = f"{base}/session/{made['sessionId']}"
    try:
        yield Browser(session)
    finally:
        _call("DELETE", session)


def _port_of(driver: subprocess.Popen[str]) -> int | None:
    """The port of a driver; None if it has ended."""
    assert driver.stdout is not None
    for line in driver.stdout:
        if match := _PORT.search(line):
            return int(match[1])
    return None


def _eventually(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise TooLateError(f"did not happen within {_WAIT_S} s")
        time.sleep(0.01)


def _call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=_TIMEOUT_S
        ) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        value = json.load(error)["value"]
        raise BrowserError(f"{value['error']}: {value['message']}") from None
