"""The page in a real browser, in front of a server whose answers are scripted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from perf.page.browser import ENTER, ESCAPE, RIGHT, SHIFT, TAB, Browser

from helpers.scripted_api import MODEL, Script, scripted_api
from helpers.server import eventually
from helpers.xss_corpus import XSS_CORPUS

pytestmark = pytest.mark.browser

IDLE = "document.querySelector('.message.assistant') && !document.querySelector('.busy')"
NARROW = (360, 740)


@pytest.fixture(scope="module")
def server() -> Iterator[Script]:
    with scripted_api(["other", MODEL]) as script:
        yield script


@pytest.fixture
def script(server: Script) -> Script:
    fresh = Script(url=server.url)
    vars(server).update(vars(fresh) | {"num_open": server.num_open})
    return server


@pytest.fixture
def page(browser: Browser, script: Script) -> Iterator[Browser]:
    """The page as at a first visit. Nothing but refused requests may be in its console at the end."""
    browser.open(script.url)
    browser.run(
        "localStorage.clear(); sessionStorage.clear(); localStorage['naiad.model'] = arguments[0]", MODEL
    )
    browser.resize(1280, 860)
    browser.prefer("light")
    browser.console()
    open_page(browser, script)
    watch_alerts(browser)
    yield browser
    assert [line for line in browser.console() if "Failed to load resource" not in line] == []


def open_page(browser: Browser, script: Script) -> None:
    """Load the page, and wait for the models."""
    browser.open(script.url)
    if not script.key:
        browser.wait("document.querySelectorAll('#model option').length")


def say(page: Browser, text: str) -> None:
    """Send a message, and wait until it has been answered."""
    page.click("#prompt")
    page.run("document.querySelector('#prompt').value = arguments[0]", text)
    page.keys(ENTER)
    page.wait(IDLE + " && document.querySelector('#prompt').value === ''")


def answers(page: Browser) -> list[str]:
    found = "document.querySelectorAll('.message.assistant > .markdown')"
    return list(page.run(f"return [...{found}].map((e) => e.innerText)"))


def questions(page: Browser) -> list[str]:
    return list(
        page.run("return [...document.querySelectorAll('.message.user .text')].map((e) => e.innerText)")
    )


def said(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_an_answer_is_streamed(page: Browser, script: Script) -> None:
    script.pieces = ["One ", "two ", "**three**"]
    say(page, "Count")
    assert answers(page) == ["One two three"]
    assert questions(page) == ["Count"]
    assert page.count(".message.assistant strong") == 1
    (body,) = script.asked
    assert (body["model"], body["stream"], said(body)) == (MODEL, True, [("user", "Count")])
    figures = page.text(".message.assistant .figures")
    assert figures.startswith("3 tokens · ")
    assert all(word in figures for word in ("first token", "prompt 7"))
    assert "One two" in page.run("return document.querySelector('#status').textContent")


def test_a_conversation_goes_on(page: Browser, script: Script) -> None:
    say(page, "First")
    script.pieces = ["Again"]
    say(page, "Second")
    assert said(script.asked[1]) == [("user", "First"), ("assistant", "Hello"), ("user", "Second")]


def test_an_answer_can_be_stopped(page: Browser, script: Script) -> None:
    script.pieces, script.is_held = ["Endless"], True
    page.type("#prompt", "Go" + ENTER)
    page.wait("document.querySelector('.message.assistant > .markdown')?.innerText === 'Endless'")
    assert script.num_open == 1
    page.click("#stop")
    eventually(lambda: script.num_open == 0)
    page.wait(IDLE)
    assert answers(page) == ["Endless"]
    assert "stopped" in page.text(".message.assistant .figures")
    page.type("#prompt", "Go" + ENTER)
    page.wait("document.querySelectorAll('.message.assistant').length === 2")
    page.keys(ESCAPE)
    eventually(lambda: script.num_open == 0)


def test_a_flood_is_shown_whole_and_can_be_stopped(page: Browser, script: Script) -> None:
    script.pieces, script.is_held = [f"**{number}** " * 8 for number in range(300)], True
    page.devtools("Emulation.setCPUThrottlingRate", rate=4)
    try:
        page.type("#prompt", "Go" + ENTER)
        page.wait("document.querySelector('.busy strong')")
        # What comes while the page rests from drawing is drawn afterwards, though nothing more comes.
        page.wait("document.querySelector('.busy strong:last-of-type').textContent === '299'")
        page.click("#stop")
        eventually(lambda: script.num_open == 0)
    finally:
        page.devtools("Emulation.setCPUThrottlingRate", rate=1)
    page.wait(IDLE)
    assert page.count(".message.assistant strong") == 300 * 8


def test_an_answer_ends_with_its_page(page: Browser, script: Script) -> None:
    script.is_held = True
    page.type("#prompt", "Go" + ENTER)
    eventually(lambda: script.num_open == 1)
    page.open("about:blank")
    eventually(lambda: script.num_open == 0)
    open_page(page, script)


def test_an_answer_can_be_made_anew(page: Browser, script: Script) -> None:
    say(page, "Question")
    say(page, "Another")
    script.pieces = ["Different"]
    page.click(".message.assistant [aria-label^=Regenerate]")
    page.wait("document.querySelectorAll('.message').length === 2")
    page.wait(IDLE)
    assert (questions(page), answers(page)) == (["Question"], ["Different"])
    assert said(script.asked[-1]) == [("user", "Question")]


def test_a_message_can_be_edited(page: Browser, script: Script) -> None:
    say(page, "Frist")
    say(page, "Second")
    page.click(".message.user [aria-label^=Edit]")
    page.keys(ESCAPE)
    assert questions(page) == ["Frist", "Second"]
    page.click(".message.user [aria-label^=Edit]")
    page.run("document.querySelector('.editor').value = ''")
    page.keys("First" + SHIFT + ENTER + "line" + ENTER)
    page.wait("document.querySelectorAll('.message').length === 2")
    page.wait(IDLE)
    assert questions(page) == ["First\nline"]
    assert said(script.asked[-1]) == [("user", "First\nline")]


def test_settings_are_sent_and_kept(page: Browser, script: Script) -> None:
    page.click("#settings-button")
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 100, "seed": 7}
    values |= {"presence_penalty": -0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1}
    for name, value in values.items():
        page.type(f"#set-{name}", str(value))
    page.type("#set-stop", "END" + ENTER + " two")
    page.type("#system", "Be brief.")
    page.run("document.querySelector('#model').value = 'other'")
    say(page, "Hello")
    (body,) = script.asked
    assert {name: body[name] for name in values} == values
    assert (body["stop"], body["model"]) == (["END", " two"], "other")
    assert said(body) == [("system", "Be brief."), ("user", "Hello")]
    open_page(page, script)
    say(page, "More")
    assert {name: script.asked[1][name] for name in values} == values
    assert said(script.asked[1])[0] == ("system", "Be brief.")


def test_a_first_request_has_no_settings(page: Browser, script: Script) -> None:
    say(page, "Hello")
    assert set(script.asked[0]) == {"model", "messages", "stream", "stream_options"}


def test_conversations_are_kept_and_deleted(page: Browser, script: Script) -> None:
    say(page, "Kept")
    page.click("#new-chat")
    script.pieces = ["Second"]
    say(page, "Other")
    open_page(page, script)
    assert (questions(page), answers(page)) == (["Other"], ["Second"])
    assert page.count("#conversations li") == 2
    page.click("#conversations li:nth-child(2) .title")
    assert (questions(page), answers(page)) == (["Kept"], ["Hello"])
    page.click("#conversations .current [aria-label^=Delete]")
    assert questions(page) == ["Other"]
    open_page(page, script)
    assert page.count("#conversations li") == 1
    assert "Kept" not in page.run("return JSON.stringify(localStorage)")


def test_a_private_conversation_is_not_kept(page: Browser, script: Script) -> None:
    say(page, "Secret one")
    assert "Secret one" in page.run("return JSON.stringify(localStorage)")
    page.click("#private")
    assert "Secret one" not in page.run("return JSON.stringify(localStorage)")
    say(page, "Secret two")
    assert page.text("#conversations .tag") == "private"
    assert "Secret" not in page.run("return JSON.stringify(localStorage)")
    open_page(page, script)
    assert page.count("#conversations li") == 0


def test_a_spoilt_history_is_passed_over(page: Browser, script: Script) -> None:
    spoilt = {
        "a": "{",
        "b": "null",
        "c": '{"id":"c"}',
        "d": '{"id":"d","messages":[{"role":"system"},null,7]}',
    }
    for name, text in spoilt.items():
        page.run("localStorage['naiad.chat.' + arguments[0]] = arguments[1]", name, text)
    page.run("localStorage['naiad.settings'] = '['")
    open_page(page, script)
    say(page, "Hello")
    assert answers(page) == ["Hello"]


def test_the_servers_words_are_shown(page: Browser, script: Script) -> None:
    script.refusal = 400, "temperature = 9.0: expected a number in [0, 2]. <b>x</b>"
    page.type("#prompt", "Hello" + ENTER)
    page.wait("!document.querySelector('#error').hidden")
    assert script.refusal[1] in page.text("#error")
    assert "400" in page.text("#error")
    assert page.count(".message") == 1
    assert page.run("return document.querySelector('#error').getAttribute('role')") == "alert"
    script.refusal = None
    page.click("#error .quiet")
    page.wait(IDLE)
    assert answers(page) == ["Hello"]
    assert page.count("#error:not([hidden])") == 0


def test_an_error_ends_a_stream(page: Browser, script: Script) -> None:
    script.pieces, script.error = ["Some text"], "The engine was lost."
    page.type("#prompt", "Hello" + ENTER)
    page.wait("!document.querySelector('#error').hidden")
    assert "The engine was lost." in page.text("#error")
    assert answers(page) == ["Some text"]
    assert "broken off" in page.text(".message.assistant .figures")
    script.error = ""
    page.click("#error .quiet")
    page.wait(IDLE)
    assert page.count(".message") == 2


def test_the_key_is_asked_for(page: Browser, script: Script) -> None:
    script.key = "sk-right"
    open_page(page, script)
    page.wait("document.querySelector('dialog').open")
    page.keys("sk-wrong" + ENTER)
    page.wait("document.querySelector('#key-error').innerText === 'This key is not known.'")
    page.keys("sk-right" + ENTER)
    page.wait("document.querySelectorAll('#model option').length === 2")
    say(page, "Hello")
    assert script.keys[-1] == "Bearer sk-right"
    assert "sk-right" in page.run("return JSON.stringify(sessionStorage)")
    assert "sk-right" not in page.run("return JSON.stringify(localStorage) + document.cookie + location.href")
    open_page(page, script)
    page.wait("document.querySelectorAll('#model option').length === 2")
    page.click("#key-button")
    page.click("#key-forget")
    page.wait(
        "document.querySelector('dialog').open && document.querySelectorAll('#model option').length === 0"
    )
    page.keys(ESCAPE)
    page.wait("!document.querySelector('#error').hidden")
    assert "A key is needed." in page.text("#error")


def test_reasoning_is_folded(page: Browser, script: Script) -> None:
    thoughts = [{"index": 0, "delta": {"reasoning": text}} for text in ("Let me ", "think")]
    script.pieces = [*thoughts, "Answer"]
    say(page, "Hello")
    assert answers(page) == ["Answer"]
    assert page.run("return document.querySelector('.reasoning').open") is False
    page.click(".reasoning summary")
    assert "Let me think" in page.text(".reasoning")
    say(page, "More")
    assert said(script.asked[1])[1] == ("assistant", "Answer")


def call_piece(index: int, **function: str) -> dict[str, Any]:
    return {"index": 0, "delta": {"tool_calls": [{"index": index, "function": function}]}}


def calls(page: Browser) -> list[str]:
    return list(page.run("return [...document.querySelectorAll('.calls section')].map((e) => e.innerText)"))


def test_calls_of_tools_are_shown_as_text(page: Browser, script: Script) -> None:
    attack = "<img src=x onerror=alert(1)>"
    script.pieces = [
        "Let me see.",
        call_piece(0, name="get_weather", arguments=""),
        call_piece(0, arguments='{"city": '),
        call_piece(0, arguments='"Oslo"}'),
        call_piece(1, name=attack, arguments=f'{{"{attack}": 1}}'),
    ]
    say(page, "What is the weather?")
    expected = ['get_weather\n{"city": "Oslo"}', f'{attack}\n{{"{attack}": 1}}']
    assert calls(page) == expected
    assert answers(page) == ["Let me see."]
    assert page.run("return document.querySelector('.calls section').ariaLabel") == "Call of get_weather"
    assert_harmless(page, attack)
    assert "Call of get_weather" in page.run("return document.querySelector('#status').textContent")
    # The same out of the history.
    open_page(page, script)
    assert calls(page) == expected


def test_an_answer_may_be_a_call_alone(page: Browser, script: Script) -> None:
    script.pieces, script.error = [call_piece(0, name="now", arguments="{}")], "broken"
    page.type("#prompt", "Go" + ENTER)
    page.wait("!document.querySelector('#error').hidden")
    assert calls(page) == ["now\n{}"]


def log_prob_piece(token: str, share: float, *others: tuple[str, float]) -> dict[str, Any]:
    def entry(text: str, value: float) -> dict[str, Any]:
        return {
            "token": text,
            "logprob": math.log(value),
            "bytes": list(text.encode("utf-8", "surrogateescape")),
        }

    best = [entry(token, share), *(entry(text, value) for text, value in others)]
    content = [{**entry(token, share), "top_logprobs": best}]
    text = token.encode("utf-8", "surrogateescape").decode("utf-8", "ignore")
    return {"index": 0, "delta": {"content": text}, "logprobs": {"content": content}}


def test_events_are_read_however_they_are_cut(page: Browser) -> None:
    sent = ": hi\n\nevent: a\ndata: 1\ndata:2\n\ndata: 😀\r\n\r\nid: 7\n\ndata\n\rdata: \u2028x\r\rdata: cut"
    read = page.run(
        """
        return (async (bytes) => {
            const { readEvents } = await import("/page/api.js");
            const found = [];
            for (let size = 1; size <= bytes.length; size++) {
                const chunks = [];
                for (let at = 0; at < bytes.length; at += size) {
                    chunks.push(new Uint8Array(bytes.slice(at, at + size)));
                }
                const events = [];
                await readEvents(new Blob(chunks).stream(), (...event) => events.push(event));
                const stream = new ReadableStream({
                    start(controller) {
                        for (const chunk of chunks) controller.enqueue(chunk);
                        controller.close();
                    },
                });
                const cut = [];
                await readEvents(stream, (...event) => cut.push(event));
                found.push(JSON.stringify(events), JSON.stringify(cut));
            }
            return [...new Set(found)];
        })(arguments[0])
        """,
        list(sent.encode()),
    )
    assert [json.loads(each) for each in read] == [
        [["a", "1\n2"], ["message", "😀"], ["message", ""], ["message", "\u2028x"]]
    ]


def test_probabilities_are_shown(page: Browser, script: Script) -> None:
    script.pieces = [
        log_prob_piece("<b>", 0.95),
        log_prob_piece(" is", 0.25, (" was", 0.5), ("<img src=x onerror=alert(1)>", 0.1)),
        # A character of four bytes in two tokens.
        log_prob_piece("\udcf0\udc9f", 0.5),
        log_prob_piece("\udc98\udc80", 0.5),
    ]
    page.click("#settings-button")
    page.click("#set-logprobs")
    say(page, "Hello")
    assert (script.asked[0]["logprobs"], script.asked[0]["top_logprobs"]) == (True, 5)
    assert page.run("return [...document.querySelectorAll('.token')].map((e) => e.textContent)") == [
        "<b>",
        " is",
        "⋯",
        "😀",
    ]
    assert page.count(".token[tabindex='0']") == 1
    page.run("document.querySelector('.token').focus()")
    page.keys(RIGHT)
    card = page.text(".token-card")
    assert all(words in card for words in ("␣is", "25.0 %", "␣was", "50.0 %", "<img")), card
    assert page.count(".token-card .chosen") == 1
    page.keys(ESCAPE)
    assert page.count(".token-card:not([hidden])") == 0
    page.click(".message.assistant [aria-pressed]")
    assert page.count(".token-strip:not([hidden])") == 0
    assert page.run("return window.alerts") == []


def test_what_a_model_writes_never_runs(page: Browser, script: Script) -> None:
    for text in XSS_CORPUS:
        page.click("#new-chat")
        script.pieces = [text[:9], text[9:], "\n\nend"]
        say(page, text.replace("\n", " "))
        assert_harmless(page, text)
        assert answers(page)[0].endswith("end"), text
    # The same out of the history.
    open_page(page, script)
    for number in range(1, len(XSS_CORPUS) + 1):
        page.click(f"#conversations li:nth-child({number}) .title")
        assert_harmless(page, str(number))


def test_names_and_errors_never_run(browser: Browser) -> None:
    name = "<img src=x onerror=alert(1)>"
    with scripted_api([name]) as script:
        browser.open(script.url)
        browser.run("localStorage.clear(); sessionStorage.clear()")
        open_page(browser, script)
        watch_alerts(browser)
        say(browser, name)
        script.refusal = 418, name
        browser.type("#prompt", name + ENTER)
        browser.wait("!document.querySelector('#error').hidden")
        assert name in browser.text("#error")
        assert_harmless(browser, name)


def watch_alerts(page: Browser) -> None:
    page.run("window.alerts = []; window.alert = (text) => window.alerts.push(text)")


def assert_harmless(page: Browser, text: str) -> None:
    """Check that nothing has run, and no element could run, load or lead anywhere but to the web."""
    found = page.run("""
        const bad = "script, iframe, object, embed, style, base, meta, link, template, form, img, svg, math";
        const shown = [...document.querySelectorAll("#messages *, #conversations *, #error *")];
        const isOurs = (e) => e.closest("button")?.querySelector(":scope > svg.icon")?.contains(e);
        const names = shown.flatMap((e) => e.getAttributeNames());
        const isSafe = (a) => /^https?:$/.test(a.protocol) && a.relList.contains("noopener");
        return [
            ...(window.alerts ?? []),
            ...shown.filter((e) => e.matches(bad) && !isOurs(e)).map((e) => e.outerHTML),
            ...names.filter((name) => /^(on.*|style|src|action)$/.test(name)),
            ...shown.filter((e) => e.matches("a") && !isSafe(e)).map((e) => e.outerHTML),
        ];
    """)
    assert found == [], text


def test_even_markup_would_not_run(page: Browser) -> None:
    page.run("""
        window.refusals = [];
        const note = (event) => window.refusals.push(event.effectiveDirective);
        document.addEventListener("securitypolicyviolation", note);
        try {
            document.body.insertAdjacentHTML("beforeend", "<img src=x onerror=alert(1)>");
        } catch {}
        const script = document.createElement("script");
        try {
            script.textContent = "alert(1)";
            document.body.append(script);
        } catch {}
        const image = document.createElement("img");
        image.src = "https://example.org/x.png";
        document.body.append(image);
    """)
    page.wait("window.refusals.includes('img-src')")
    assert {"require-trusted-types-for", "img-src"} <= set(page.run("return window.refusals"))
    assert page.run("return window.alerts") == []
    assert page.console() != []


def test_code_and_tables(page: Browser, script: Script) -> None:
    script.pieces = ["```py\nif a < b:\n    *c*\n```\n\n|a|b|\n|:-|-:|\n|1|x\\|y|\n|2|\n"]
    say(page, "Hello")
    assert page.run("return document.querySelector('pre').textContent") == "if a < b:\n    *c*"
    assert page.text("figcaption span") == "py"
    rows = "[...document.querySelectorAll('table tr')]"
    assert page.run(f"return {rows}.map((row) => [...row.children].map((cell) => cell.innerText))") == [
        ["a", "b"],
        ["1", "x|y"],
        ["2", ""],
    ]


WIDE_TEXT = "\n\n".join(
    [
        "W" * 300,
        "```\n" + "code " * 60 + "\n```",
        "|" + "heading|" * 12 + "\n|" + "-|" * 12 + "\n|" + "value|" * 12,
        "https://example.org/" + "path/" * 60,
        "- " * 12 + "deep",
        "> " * 12 + "quoted",
    ]
)


def overflow(page: Browser) -> float:
    """How many pixels of the page lie beside the window."""
    return float(
        page.run("""
        const wide = [...document.querySelectorAll("html, body, main, #scroller, .side, #engine")];
        return Math.max(...wide.map((e) => e.clientWidth && e.scrollWidth - e.clientWidth));
    """)
    )


def test_a_narrow_window_scrolls_no_sideways(page: Browser, script: Script) -> None:
    page.resize(*NARROW)
    page.run("document.querySelector('#key-button').hidden = false")
    assert overflow(page) == 0
    script.pieces = [WIDE_TEXT]
    say(page, "W" * 200)
    assert overflow(page) == 0
    page.click(".message.user [aria-label^=Edit]")
    assert overflow(page) == 0
    page.keys(ESCAPE)
    for name in ("history", "settings"):
        page.click(f"#{name}-button")
        assert overflow(page) == 0
        page.keys(ESCAPE)
        page.wait("document.activeElement.id === arguments[0]", f"{name}-button")
    script.refusal = 400, "W" * 300
    page.type("#prompt", "Again" + ENTER)
    page.wait("!document.querySelector('#error').hidden")
    assert overflow(page) == 0


def focused(page: Browser) -> str:
    at = "document.activeElement"
    return str(page.run(f"return {at}.id || {at}.getAttribute('aria-label') || {at}.tagName"))


def test_everything_is_reached_with_the_keyboard(page: Browser, script: Script) -> None:
    page.keys("Hello" + ENTER)
    page.wait(IDLE)
    page.run("document.querySelector('#tab-chat').focus()")
    order = [focused(page)]
    while order[-1] != "send" and len(order) < 40:
        page.keys(TAB)
        order.append(focused(page))
        outline = page.run("return getComputedStyle(document.activeElement).outlineStyle")
        # The frame around the message field shows its focus.
        assert outline != "none" or order[-1] == "prompt", f"the focus on {order[-1]} is not seen"
    expected = ["tab-chat", "theme", "new-chat", "private", "history-button", "model", "settings-button"]
    expected += ["Copy the message", "Edit the message", "Regenerate the answer", "prompt", "send"]
    assert [each for each in expected if each not in order] == []
    assert sorted(expected, key=order.index) == expected, order
    page.keys(SHIFT + TAB)
    assert focused(page) == "prompt"


def test_tabs_move_with_the_arrow_keys(page: Browser) -> None:
    page.run("document.querySelector('#tab-chat').focus()")
    page.keys(RIGHT)
    assert focused(page) == "tab-engine"
    assert page.count("#chat[hidden]") == 1
    assert page.count("#engine:not([hidden])") == 1
    page.wait("document.querySelector('#engine').childElementCount")
    root = "document.documentElement"
    assert page.run(f"return {root}.scrollHeight - {root}.clientHeight") == 0
    page.keys(RIGHT)
    assert page.count("#chat:not([hidden])") == 1
    # Where the engine view is missing, the browser says so.
    page.console()


SEEN = "[...document.querySelectorAll('#engine h3, #engine dt')].filter((each) => each.checkVisibility())"


@pytest.mark.parametrize("is_operator", [True, False])
def test_who_is_no_operator_sees_what_is_its_own(page: Browser, script: Script, is_operator: bool) -> None:
    script.is_operator = is_operator
    page.click("#tab-engine")
    page.wait("document.querySelector('#engine .ev-is-live')")
    names = page.run(f"return {SEEN}.map((each) => each.textContent)")
    of_all = {"Output tokens/s", "KV cache", "Batch of the last steps", "Drafts accepted by place"}
    assert {"Running", "Requests", "Tenants' shares"} <= set(names)
    assert of_all & set(names) == (of_all if is_operator else set())
    assert page.count(".ev-requests tbody tr") == (3 if is_operator else 2)
    assert page.run("return document.querySelector('.ev-own').checkVisibility()") == (not is_operator)
    shares = page.run("return document.querySelector('.ev-tenants tbody').textContent")
    assert ("%" in shares) == is_operator


def test_every_control_has_a_name(page: Browser, script: Script) -> None:
    script.pieces = ["```\nx\n```\n- [ ] y"]
    page.click("#settings-button")
    say(page, "Hello")
    controls = page.run("""
        const all = [...document.querySelectorAll("button, input, select, textarea, [tabindex='0']")];
        return all.filter((e) => e.checkVisibility()).map((e, n) => (e.dataset.test = n));
    """)
    assert len(controls) > 25
    names = {number: page.label(f"[data-test='{number}']") for number in controls}
    assert [number for number, name in names.items() if not name.strip()] == []


def test_light_and_dark(page: Browser, script: Script) -> None:
    say(page, "Hello")
    back = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(back)
    page.prefer("dark")
    dark = page.run(back)
    assert light != dark
    page.click("#theme")
    page.keys("Light" + ENTER)
    assert page.run(back) == light
    open_page(page, script)
    assert page.run(back) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(page: Browser, script: Script, scheme: str) -> None:
    script.pieces = ["Text, `code` and https://a.example\n\n> quote\n\n```py\nx\n```"]
    page.prefer(scheme)
    page.click("#settings-button")
    say(page, "Hello")
    low = page.run("""
        const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
        const paint = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); };
        const read = () => [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
        const light = (rgb) => {
            const linear = (v) => (v > 0.04045 ? ((v + 0.055) / 1.055) ** 2.4 : v / 12.92);
            const [r, g, b] = rgb.map((v) => linear(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const low = [];
        for (const e of document.querySelectorAll("body *")) {
            const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
            if (!own || !e.checkVisibility() || e.closest("option, .visually-hidden")) continue;
            const above = [];
            for (let p = e; p; p = p.parentElement) above.unshift(getComputedStyle(p).backgroundColor);
            above.forEach(paint);
            const back = light(read());
            paint(getComputedStyle(e).color);
            const text = light(read());
            const contrast = (Math.max(back, text) + 0.05) / (Math.min(back, text) + 0.05);
            if (contrast < 4.5) low.push([e.tagName, e.className, e.textContent.slice(0, 20), contrast]);
        }
        return low;
    """)
    assert low == [], json.dumps(low, indent=1)
