"""The page in a real browser, in front of a real server: what is asked reaches the engine, and ends there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from perf.page.browser import ENTER, Browser

from helpers.openai_api import MODEL, address
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import create_repository, endless_checkpoint

pytestmark = pytest.mark.browser

IDLE = "document.querySelector('.message.assistant') && !document.querySelector('.busy')"
TEXT = "document.querySelector('.message.assistant > .markdown')?.innerText"


@pytest.fixture(scope="module")
def api(browser: Browser, tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    repository = folder / "repository"
    create_repository(repository, endless_checkpoint(folder / "checkpoint"), "--kv-cache-bytes", "64000000")
    with running(leaving, repository, "--openai-port", "0") as server:
        yield server


@pytest.fixture
def page(browser: Browser, api: Server) -> Iterator[Browser]:
    """The page as at a first visit; greedy."""
    browser.open(f"http://{address(api)}/")
    browser.run(
        "localStorage.clear(); sessionStorage.clear(); localStorage['naiad.settings'] = arguments[0]", "{}"
    )
    browser.console()
    browser.open(f"http://{address(api)}/")
    browser.wait("document.querySelector('#model').value === arguments[0]", MODEL)
    browser.click("#settings-button")
    browser.type("#set-temperature", "0")
    browser.wait("document.querySelector('#set-temperature').value === '0'")
    yield browser
    browser.open("about:blank")
    eventually(lambda: num_running(api) == 0)
    assert browser.console() == []


def num_running(api: Server) -> float:
    return api.metric("vllm:num_requests_running") + api.metric("vllm:num_requests_waiting")


def ask(page: Browser, text: str, max_tokens: int | None = None) -> None:
    if max_tokens is not None:
        page.type("#set-max_tokens", str(max_tokens))
    page.type("#prompt", text + ENTER)


def test_an_answer_streams_and_is_stopped(page: Browser, api: Server) -> None:
    ask(page, "Hello")
    page.wait(f"({TEXT} ?? '').length > 20")
    early = len(page.run(f"return {TEXT}"))
    page.wait(f"{TEXT}.length > arguments[0]", early)
    eventually(lambda: num_running(api) == 1)
    page.click("#stop")
    eventually(lambda: num_running(api) == 0)
    eventually(lambda: api.used_blocks() == 0)
    page.wait(IDLE)
    figures = page.text(".message.assistant .figures")
    assert all(word in figures for word in ("tokens · ", "tokens/s", "first token", "stopped")), figures


def test_a_page_that_is_left_asks_for_nothing_more(page: Browser, api: Server) -> None:
    ask(page, "Hello")
    eventually(lambda: num_running(api) == 1)
    page.open("about:blank")
    eventually(lambda: num_running(api) == 0)


def test_the_same_again_and_something_else(page: Browser) -> None:
    ask(page, "Hello", max_tokens=24)
    page.wait(IDLE)
    first = page.run(f"return {TEXT}")
    assert "24 tokens" in page.text(".message.assistant .figures")
    assert "cut at the limit" in page.text(".message.assistant .figures")
    page.click(".message.assistant [aria-label^=Regenerate]")
    page.wait(f"{IDLE} && {TEXT} === arguments[0]", first)
    page.click(".message.user [aria-label^=Edit]")
    page.keys(" you" + ENTER)
    page.wait(f"{IDLE} && {TEXT} !== arguments[0]", first)
    assert page.text(".message.user .text") == "Hello you"


def test_every_setting_is_taken(page: Browser) -> None:
    values = {
        "temperature": "",
        "top_p": "0.9",
        "top_k": "20",
        "min_p": "0.01",
        "seed": "5",
        "max_tokens": "9",
    }
    values |= {"presence_penalty": "0.5", "frequency_penalty": "0.5", "repetition_penalty": "1.1"}
    for name, value in values.items():
        page.type(f"#set-{name}", value)
    page.type("#set-stop", "never said")
    page.type("#system", "Be brief.")
    page.click("#set-logprobs")
    ask(page, "Hello")
    page.wait(IDLE)
    assert page.count(".token") == 9
    assert page.count("#error:not([hidden])") == 0


def test_the_servers_refusal_is_shown(page: Browser) -> None:
    page.run("document.querySelector('#set-temperature').value = -1")
    ask(page, "Hello")
    page.wait("!document.querySelector('#error').hidden")
    assert "temperature" in page.text("#error")
    # The browser itself notes the status.
    assert all("400" in line for line in page.console())
