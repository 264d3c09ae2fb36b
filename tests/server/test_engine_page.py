"""The engine view in a real browser, in front of a real server."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from perf.page.browser import LEFT, Browser

from helpers.openai_api import COMPLETIONS, address, connect
from helpers.server import Leaving, Server, start_server

pytestmark = pytest.mark.browser

STATUS = "document.querySelector('.ev-status').textContent"
LIVE = f"document.querySelector('.ev-status') && {STATUS} === 'Live'"
ROW = "[...document.querySelectorAll('.ev-requests tbody th')].find(each => each.title === 'cmpl-watched')"
ENDLESS = {
    "model": "checkpoint",
    "prompt": "Hello",
    "max_tokens": 30_000,
    "stream": True,
    "ignore_eos": True,
    "request_id": "watched",
}


@pytest.fixture(scope="module")
def api(browser: Browser, tiny_dir: Path, leaving: Leaving) -> Iterator[Server]:
    running = start_server(tiny_dir, "--dtype", "float32", "--openai-port", "0")
    yield running
    leaving.take(running)


@pytest.fixture
def view(browser: Browser, api: Server) -> Iterator[Browser]:
    browser.open(f"http://{address(api)}/#engine")
    browser.wait(LIVE)
    yield browser
    browser.open("about:blank")


def begin(server: Server) -> http.client.HTTPResponse:
    """Begin an endless stream; return the response after its first event. Its `close` cancels."""
    connection = connect(server)
    connection.request("POST", COMPLETIONS, json.dumps(ENDLESS), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return response


def test_a_row_appears_while_its_request_runs_and_vanishes(view: Browser, api: Server) -> None:
    assert view.run(f"return {ROW} === undefined")
    stream = begin(api)
    view.wait(ROW)
    assert view.run(f"return {ROW}.closest('tr').querySelector('.ev-state').textContent") == "generating"
    words = f"{ROW}?.closest('tr').querySelector('.ev-bar-words').textContent"
    before = view.run(f"return {words}")
    view.wait(f"{words} !== arguments[0]", before)
    view.wait("document.querySelector('.ev-tile .ev-value').textContent !== '0'")
    stream.close()
    view.wait(f"!{ROW}")
    assert view.console() == []


def test_a_screen_reader_and_a_keyboard_find_everything(view: Browser, api: Server) -> None:
    stream = begin(api)
    view.wait(ROW)
    stream.close()
    # The last step is there when its request is gone.
    view.wait(f"!{ROW}")
    # The timeline tells one step in words, and the arrow keys choose it.
    view.wait("document.querySelector('.ev-timeline').getAttribute('aria-valuenow') > 2")
    view.run("document.querySelector('.ev-timeline').focus()")
    view.keys(LEFT + LEFT)
    told = view.run("return document.querySelector('.ev-timeline').getAttribute('aria-valuetext')")
    now, most = (
        int(view.run(f"return document.querySelector('.ev-timeline').getAttribute('aria-value{name}')"))
        for name in ("now", "max")
    )
    assert now == most - 2
    assert told.startswith(f"Step {now:,}: ")
    assert "blocks of the KV cache: free" in view.label(".ev-map")
    for canvas in range(view.count("canvas")):
        assert view.run(
            "const each = document.querySelectorAll('canvas')[arguments[0]];"
            "return each.ariaHidden === 'true' || Boolean(each.ariaLabel)",
            canvas,
        )
    assert view.run(
        "return [...document.querySelectorAll('.ev table')].every("
        "each => each.caption.textContent && each.querySelectorAll('thead th[scope=col]').length)"
    )
    # The choice of the newest step again, so that the next test begins as this one.
    view.run("document.activeElement.blur()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1400])
def test_nothing_is_wider_than_the_window(view: Browser, scheme: str, width: int) -> None:
    view.resize(width, 900)
    view.prefer(scheme)
    assert view.run("return document.querySelector('#engine').scrollWidth <= innerWidth")
    # Canvases get their colours from the theme.
    view.wait(
        "(() => { const map = document.querySelector('.ev-map');"
        "const [r, g, b, a] = map.getContext('2d').getImageData(2, 2, 1, 1).data;"
        "return a === 255 && (r + g + b > 384) === (arguments[0] === 'light'); })()",
        scheme,
    )
    view.resize(1280, 860)


def test_a_restart_of_the_engine_is_told_and_the_view_goes_on(view: Browser, api: Server) -> None:
    api.processes("naiad.engine_process")[0].send_signal(signal.SIGKILL)
    view.wait(f"{STATUS}.includes('does not serve now')")
    view.wait(LIVE)
    stream = begin(api)
    view.wait(ROW)
    stream.close()
    view.wait(f"!{ROW}")
