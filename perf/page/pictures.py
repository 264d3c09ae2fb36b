"""Takes the docs' pictures of the page in a headless Chromium: `python -m perf.page.pictures`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from perf.page.browser import ENTER, RIGHT, Browser, missing, started
from perf.server.serve_process import naiad_serve

_FOLDER = Path("docs/images")
_MAX_BYTES = 150_000
_WIDE, _NARROW = (1200, 780), (360, 740)
_TALK = (
    ("What is the capital of France?", 40),
    ("Write a Python function is_even(n) in a ```python block, then one sentence about it.", 100),
)
# Answers of each request that the engine view shows; a browser opens few connections to a server.
_ANSWERS = (6, 4, 3)
_WATCH_S = 4.0
_GENERATE = """
fetch("/v1/completions", {
  method: "POST",
  headers: {"Content-Type": "application/json"},
  body: JSON.stringify({
    model: document.querySelector("#model").value,
    prompt: arguments[0], n: arguments[1], max_tokens: 400, ignore_eos: true,
  }),
});
"""


def chat(browser: Browser) -> None:
    """A conversation with code."""
    for text, num_tokens in _TALK:
        _ask(browser, text, num_tokens)


def chat_dark(browser: Browser) -> None:
    """The same in the dark, with the probabilities of an answer and the settings."""
    chat(browser)
    browser.prefer("dark")
    browser.click("#settings-button")
    browser.click("#set-logprobs")
    _ask(browser, "Name three rivers of Europe.", 40)
    browser.run("document.querySelector('.token').focus()")
    browser.keys(RIGHT * 6)


def chat_narrow(browser: Browser) -> None:
    """The same on a telephone."""
    browser.resize(*_NARROW)
    chat(browser)


def engine(browser: Browser) -> None:
    """The engine view while three requests of several answers run."""
    for number, num_answers in enumerate(_ANSWERS):
        prompt = f"Question {number}: {_TALK[1][0]} " * (1 + 6 * number)
        browser.run(_GENERATE, prompt, num_answers)
    browser.click("#tab-engine")
    time.sleep(_WATCH_S)


PICTURES: dict[str, Callable[[Browser], None]] = {
    "page-chat": chat,
    "page-chat-dark": chat_dark,
    "page-chat-narrow": chat_narrow,
    "page-engine": engine,
}


def _ask(browser: Browser, text: str, num_tokens: int) -> None:
    """Ask, and wait for the answer."""
    values = {"temperature": 0, "max_tokens": num_tokens}
    for name, value in values.items():
        browser.run(f"document.querySelector('#set-{name}').value = arguments[0]", value)
    number = browser.count(".message.assistant")
    browser.type("#prompt", text + ENTER)
    browser.wait(f"document.querySelectorAll('.message.assistant').length > {number}")
    browser.wait("!document.querySelector('.busy')")


def _open(browser: Browser, url: str) -> None:
    """Open the page as at a first visit."""
    browser.resize(*_WIDE)
    browser.prefer("light")
    browser.open(url)
    browser.run("localStorage.clear()")
    browser.open(url)
    browser.wait("document.querySelector('#model').value")


def _take(browser: Browser, url: str, name: str, folder: Path) -> None:
    _open(browser, url)
    PICTURES[name](browser)
    png = browser.screenshot()
    if len(png) > _MAX_BYTES:
        raise RuntimeError(f"{name} has {len(png)} bytes, more than {_MAX_BYTES}")
    path = folder / f"{name}.png"
    path.write_bytes(png)
    print(f"{path}: {len(png)} bytes")


def main() -> int:
    """Parse the command line, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=_FOLDER, help="folder of the pictures")
    parser.add_argument("--model", default="default", help="model that answers, as for `naiad serve`")
    parser.add_argument("--only", choices=sorted(PICTURES), action="append", help="a picture to take")
    args = parser.parse_args()
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 1
    args.to.mkdir(parents=True, exist_ok=True)
    with naiad_serve(["--model", args.model]) as served, started() as browser:
        url = f"http://{served.openai}/"
        _open(browser, url)
        # The first answers of a server are slower.
        chat(browser)
        for name in args.only or PICTURES:
            _take(browser, url, name, args.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
