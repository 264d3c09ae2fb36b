"""What the page makes of a model's Markdown, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from perf.page.browser import Browser

from helpers.scripted_api import scripted_api

pytestmark = pytest.mark.browser

LENGTH = 200_000


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with scripted_api() as script:
        yield script.url


@pytest.fixture
def show(browser: Browser, address: str) -> Callable[[str], str]:
    """Makes elements of a text with the page's own module, and returns them as markup."""
    if not browser.run("return location.href").startswith(address):
        browser.open(address)
    script = """
        const { showMarkdown } = await import("/page/markdown.js");
        const root = document.createElement("div");
        showMarkdown(root, text);
        return root.innerHTML;
    """

    def show(text: str) -> str:
        return str(browser.run(f"return (async (text) => {{ {script} }})(arguments[0])", text))

    return show


MARKDOWN = {
    "emphasis": (
        "*a* **b** ***c*** ~~d~~ `e`",
        "<em>a</em> <strong>b</strong> <strong><em>c</em></strong> <del>d</del> <code>e</code>",
    ),
    "nested emphasis": ("**a *b* c**", "<strong>a <em>b</em> c</strong>"),
    "unclosed": ("**a *b", "**a *b"),
    "names": ("a_b_c 2 * 3 * 4", "a_b_c 2 * 3 * 4"),
    "escapes": (r"\*a\* \<b>", "*a* &lt;b&gt;"),
    "code first": ("`*a*` ``b`c``", "<code>*a*</code> <code>b`c</code>"),
    "tags": ("<b>x</b> &amp;", "&lt;b&gt;x&lt;/b&gt; &amp;amp;"),
}


@pytest.mark.parametrize("case", MARKDOWN)
def test_markdown_in_a_line(show: Callable[[str], str], case: str) -> None:
    text, expected = MARKDOWN[case]
    assert show(text) == f"<p>{expected}</p>"


BLOCKS = {
    "heading": ("# A\n### B", "<h3>A</h3><h5>B</h5>"),
    "paragraphs": ("a\nb\n\nc", "<p>a\nb</p><p>c</p>"),
    "code without a fence": ("def f():\n    g()", "<p>def f():\n    g()</p>"),
    "rule": ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    "list": ("- a\n- b\n  - c\n\nd", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>d</p>"),
    "numbers": ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    "loose list": ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
    "quote": ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
    "no table": ("a | b\nc | d", "<p>a | b\nc | d</p>"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_markdown_blocks(show: Callable[[str], str], case: str) -> None:
    text, expected = BLOCKS[case]
    assert show(text) == expected


def test_an_unfinished_code_block_is_code(show: Callable[[str], str]) -> None:
    assert "<pre" in show("```\nx")


def test_links_show_where_they_lead(show: Callable[[str], str]) -> None:
    found = show("[bank.example](https://evil.example/x) https://a.example/b_(c). [x](mailto:a@b)")
    assert 'href="https://evil.example/x"' in found
    assert "(evil.example)" in found
    assert found.count("<a ") == 2
    assert 'href="https://a.example/b_(c)"' in found
    assert found.count('rel="noopener noreferrer nofollow"') == 2
    assert "x (mailto:a@b)" in found


HEAVY = [
    "*a ",
    "[",
    "[a](",
    "`",
    "` `` ",
    "> ",
    "- ",
    "**a*",
    "_a_*",
    "http://",
    "http://a.",
    "|a",
    "~~a",
    "  - a\n",
    "<http://",
    "![",
    "](a ",
    "# #",
    "\\",
]


@pytest.mark.parametrize("piece", HEAVY)
def test_no_text_takes_the_page_long(show: Callable[[str], str], piece: str) -> None:
    # WebDriver ends a script after 30 s: time that grows with the square of the length takes minutes.
    assert show(piece * (LENGTH // len(piece)) + "x")
    assert show(("a " + piece.strip() + "\n") * (LENGTH // (len(piece) + 3)))


DEEP = [
    "> " * 1000 + "x",
    "- " * 1000 + "x",
    "*a _b " * 1000 + "c_ d* " * 1000,
    "[" * 1000 + "x" + "](http://a)" * 1000,
]


@pytest.mark.parametrize("text", DEEP)
def test_no_text_nests_elements_deeply(show: Callable[[str], str], text: str) -> None:
    depth = deepest = 0
    for tag in re.findall(r"</?(?=[a-z])", show(text)):
        depth += 1 if tag == "<" else -1
        deepest = max(deepest, depth)
    assert depth == 0
    assert 5 < deepest < 50
