"""The files of the page: how they are sent, and what they must not hold."""

from __future__ import annotations

import gzip
import http.client
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.scripted_api import Script, scripted_api
from naiad.openai_server import page_routes

FILES = sorted((Path(page_routes.__file__).parent / "page").iterdir())
MAX_BYTES, MAX_SENT_BYTES = 100_000, 40_000
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}
# All of them can make markup, or run, what was text.
MAKES_MARKUP = re.compile(
    r"\b(innerHTML|outerHTML|insertAdjacentHTML|setHTMLUnsafe|createContextualFragment|DOMParser|srcdoc)\b"
    r"|document\.write|\beval\(|new Function\b|\bset(Timeout|Interval)\(\s*[\"'`]"
)
# The name of a namespace is not fetched.
LOADS_FROM_ELSEWHERE = re.compile(
    r"(?<![\w])(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z0-9-]+\.[a-z]{2,}", re.I
)


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with scripted_api() as served:
        yield served


def get(script: Script, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(script.url.split("/")[2], timeout=60)
    sent = {name.replace("_", "-"): text for name, text in headers.items()}
    connection.request(method, path, headers=sent)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


def test_the_page_is_small(script: Script) -> None:
    num_bytes = num_sent_bytes = 0
    for path in FILES:
        _, headers, body = get(script, f"/page/{path.name}", Accept_Encoding="gzip, deflate, br")
        assert headers["content-encoding"] == "gzip"
        assert gzip.decompress(body) == get(script, f"/page/{path.name}")[2]
        num_bytes += len(gzip.decompress(body))
        num_sent_bytes += len(body)
    assert num_bytes <= MAX_BYTES
    assert num_sent_bytes <= MAX_SENT_BYTES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_sent_without_indentation_and_lines_of_comment(script: Script, path: Path) -> None:
    wanted = [line.lstrip() for line in path.read_text().splitlines()]
    if path.suffix in (".js", ".css"):
        is_comment = re.compile(r"//.*|/\*.*\*/").fullmatch
        wanted = [line for line in wanted if not is_comment(line)]
    assert get(script, f"/page/{path.name}")[2].decode().splitlines() == wanted


def test_no_text_of_a_script_has_several_lines() -> None:
    """Their indentation would be lost."""
    for path in FILES:
        if path.suffix == ".js":
            texts = re.findall(
                r"`(?:[^`\\]|\\.)*`",
                re.sub(r"/(?:[^/\\\n]|\\.)*`(?:[^/\\\n]|\\.)*/|\"`\"", "", path.read_text()),
            )
            assert not [text for text in texts if "\n" in re.sub(r"\$\{[^}]*\}", "", text)], path.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_sent_with_its_type_and_the_policy(script: Script, path: Path) -> None:
    status, headers, _ = get(script, f"/page/{path.name}")
    assert status == 200
    assert headers["content-type"] == TYPES[path.suffix]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]


def test_the_root_is_the_index(script: Script) -> None:
    assert get(script, "/")[2] == get(script, "/page/index.html")[2]
    assert get(script, "/", "HEAD")[0] == 200


def test_a_reload_sends_nothing_that_is_known(script: Script) -> None:
    _, headers, _ = get(script, "/page/chat.js")
    assert headers["cache-control"] == "no-cache"
    assert get(script, "/page/chat.js", If_None_Match=headers["etag"])[::2] == (304, b"")
    assert get(script, "/page/chat.js", If_None_Match='"older"')[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/other.js",
        "/page/../page_routes.py",
        "/page/%2e%2e%2fpage_routes.py",
        "/page//chat.js",
    ],
)
def test_nothing_else_is_sent(script: Script, path: str) -> None:
    assert get(script, path)[0] == 404


def test_the_page_is_for_known_hosts(script: Script) -> None:
    assert get(script, "/", Host="rebound.example")[0] == 403


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_makes_markup_or_loads_from_elsewhere(path: Path) -> None:
    text = path.read_text()
    assert not MAKES_MARKUP.search(text)
    assert not LOADS_FROM_ELSEWHERE.search(text)
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)
