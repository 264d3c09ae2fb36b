from __future__ import annotations

import asyncio
import hmac
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict, CIMultiDictProxy

from naiad.errors import StartupError
from naiad.openai_server.access import gate as gate_module
from naiad.openai_server.access.gate import Gate, caller_of, metered
from naiad.openai_server.access.key_file import digest_of
from naiad.openai_server.access.policy import is_loopback, need_of
from naiad.openai_server.api.errors import APIError

PATHS = ("/", "/health", "/health/deep", "/metrics", "/page/{name}", "/version", "/v1/models/{name:.+}")


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": digest_of(f"key of {name}"), "tenant": name, **fields}


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": entries}))
    path.chmod(0o600)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    users = [entry(f"user {number}".replace(" ", "-")) for number in range(5)]
    return write(tmp_path / "keys.json", *users, entry("boss", role="operator"))


def requested(path: str, method: str = "GET", **headers: str) -> web.Request:
    """A request that has been routed."""
    app = web.Application()

    async def handler(_request: web.Request) -> web.Response:
        return web.Response()

    for each in PATHS:
        app.router.add_get(each, handler)
    app.router.add_post("/v1/completions", handler)
    app.freeze()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    request = make_mocked_request(method, path, sent, app=app)
    match = asyncio.run(app.router.resolve(request))
    match.add_app(app)
    request._match_info = match
    return request


def status(gate: Gate, path: str, method: str = "GET", **headers: str) -> int:
    """The status of a refusal; 200: it is let in."""
    try:
        gate.identify(requested(path, method, **headers))
    except APIError as error:
        return error.status
    return 200


def test_a_key_that_is_sent_twice_is_not_called_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Authorization", "x-api-key"):
        request = requested("/version")
        monkeypatch.setattr(request, "_headers", CIMultiDictProxy(CIMultiDict([(name, "a"), (name, "b")])))
        with pytest.raises(APIError, match=f"The header {name} was sent more than once"):
            Gate(path).identify(request)


@pytest.mark.parametrize(
    ("route", "need"),
    [
        ("/", "nothing"),
        ("/health", "nothing"),
        ("/health/ready", "nothing"),
        ("/page", "nothing"),
        ("/page/{name}", "nothing"),
        ("/metrics", "operator"),
        ("/health/deep", "operator"),
        ("/pages", "user"),
        ("/v1/models", "user"),
        ("/anything", "user"),
        (None, "user"),
    ],
)
def test_the_table_of_routes(route: str | None, need: str) -> None:
    assert need_of(route, metrics_open=False) == need
    assert need_of(route, metrics_open=True) == ("nothing" if route == "/metrics" else need)


# Path → what is answered without a key, to a user, to an operator.
ANSWERS = {
    "/": (200, 200, 200),
    "/health": (200, 200, 200),
    "/page/app.js": (200, 200, 200),
    "/%68ealth": (200, 200, 200),
    "/health/deep": (401, 403, 200),
    "/metrics": (401, 403, 200),
    "/m%65trics": (401, 403, 200),
    "/version": (401, 200, 200),
    "/v1/models/a": (401, 200, 200),
    "/nothing": (401, 200, 200),
    "//": (401, 200, 200),
    "//health": (401, 200, 200),
    "/health/": (401, 200, 200),
    "/health%2fdeep": (401, 200, 200),
    "/health/..": (401, 200, 200),
    "/page/../version": (401, 200, 200),
    "/page/..%2fversion": (200, 200, 200),
    "/page/%2e%2e/metrics": (401, 200, 200),
    "/HEALTH": (401, 200, 200),
    "/health;x": (401, 200, 200),
    "/health?x=/metrics": (200, 200, 200),
}


@pytest.mark.parametrize("place", ANSWERS)
def test_the_route_that_answers_decides(path: Path, place: str) -> None:
    """Not the path as it was sent: only a page's name may hold anything."""
    gate = Gate(path)
    keys: list[dict[str, str]] = [{}, {"x_api_key": "key of user-3"}, {"x_api_key": "key of boss"}]
    assert tuple(status(gate, place, **key) for key in keys) == ANSWERS[place]
    assert status(gate, place, x_api_key="other") == ANSWERS[place][0]


def test_a_method_that_a_route_does_not_have_needs_a_key(path: Path) -> None:
    gate = Gate(path)
    assert status(gate, "/health", "HEAD") == 200
    for method in ("POST", "OPTIONS", "TRACE", "BREW"):
        assert status(gate, "/health", method) == 401
    assert status(gate, "/metrics", "HEAD", x_api_key="key of user-1") == 403


def test_open_metrics_need_no_key(path: Path) -> None:
    gate = Gate(path, metrics_open=True)
    assert status(gate, "/metrics") == 200
    assert status(gate, "/health/deep") == 401


@pytest.mark.parametrize(
    ("headers", "is_known"),
    [
        ({"Authorization": "Bearer key of boss"}, True),
        ({"Authorization": "bearer  key of boss "}, True),
        ({"x_api_key": "key of boss"}, True),
        ({"Authorization": "Basic abc", "x_api_key": "key of boss"}, True),
        ({"Authorization": "Bearer key of boss", "x_api_key": "other"}, True),
        ({"Authorization": "Bearer other", "x_api_key": "key of boss"}, False),
        ({"Authorization": "Bearer"}, False),
        ({"Authorization": "Bearer "}, False),
        ({"Authorization": "key of boss"}, False),
        ({"Authorization": "Basic key of boss"}, False),
        ({"Authorization": "Bearer key of bos"}, False),
        ({"Authorization": "Bearer key of boss."}, False),
        ({"Authorization": f"Bearer {digest_of('key of boss')}"}, False),
        ({"Authorization": "Bearer \u1234"}, False),
        ({"x_api_key": ""}, False),
        ({"cookie": "x-api-key=key of boss"}, False),
    ],
)
def test_where_a_key_may_stand(path: Path, headers: dict[str, str], is_known: bool) -> None:
    assert status(Gate(path), "/metrics", **headers) == (200 if is_known else 401)


def test_a_query_holds_no_key(path: Path) -> None:
    assert status(Gate(path), "/version?api_key=key+of+boss") == 401


def test_errors_have_the_words_that_clients_know(path: Path) -> None:
    gate = Gate(path)
    with pytest.raises(APIError) as missing:
        gate.identify(requested("/version"))
    assert missing.value.headers == {"WWW-Authenticate": "Bearer"}
    assert missing.value.code == "invalid_api_key"
    error = json.loads(missing.value.body)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    with pytest.raises(APIError) as wrong:
        gate.identify(requested("/version", x_api_key="sk-nobody"))
    assert "sk-nobody" not in wrong.value.message
    with pytest.raises(APIError, match="needs the role operator"):
        gate.identify(requested("/metrics", x_api_key="key of user-0"))


@pytest.mark.parametrize("presented", ["key of user-0", "key of user-2", "key of boss", "other", ""])
def test_every_entry_is_compared(path: Path, presented: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def compare(left: str, right: str) -> bool:
        compared.append((left, right))
        return hmac.compare_digest(left, right)

    class Counting:
        compare_digest = staticmethod(compare)

    gate = Gate(path)
    monkeypatch.setattr(gate_module, "hmac", Counting)
    found = gate.find(presented)
    assert (None if found is None else f"key of {found.name}") == (
        presented if presented.startswith("key") else None
    )
    assert len({left for left, _ in compared}) == len(compared) == 6
    assert {right for _, right in compared} == {digest_of(presented)}


def test_a_file_is_read_again_and_a_wrong_one_changes_nothing(path: Path) -> None:
    gate = Gate(path)
    write(path, entry("new"))
    assert status(gate, "/version", x_api_key="key of new") == 401
    assert gate.reload() == 1
    assert status(gate, "/version", x_api_key="key of new") == 200
    assert status(gate, "/version", x_api_key="key of boss") == 401
    path.write_text("{")
    with pytest.raises(StartupError, match="not JSON"):
        gate.reload()
    path.unlink()
    with pytest.raises(StartupError, match="can not be read"):
        gate.reload()
    assert status(gate, "/version", x_api_key="key of new") == 200


def posted(gate: Gate, name: str) -> web.Request:
    request = requested("/v1/completions", "POST", x_api_key=f"key of {name}")
    gate.identify(request)
    return request


def test_a_process_that_is_started_again_takes_the_last_good_keys(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is locked out by a file that was already wrong when the process before went on without it."""
    kept = path.parent / "kept.json"
    Gate(path, last_good=kept)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    write(path, entry("new"))
    Gate(path, last_good=kept)
    path.write_text("broken")
    again = Gate(path, last_good=kept)
    assert again.find("key of new") is not None
    assert again.find("key of boss") is None
    assert "the old keys stay" in caplog.text
    write(path, entry("newest"))
    assert again.reload() == 1
    assert Gate(kept).find("key of newest") is not None


def test_keys_that_can_not_be_kept_leave_no_older_ones(path: Path) -> None:
    kept = path.parent / "kept.json"
    Gate(path, last_good=kept)
    kept.with_name("kept.json.part").mkdir()
    write(path, entry("new"))
    gate = Gate(path, last_good=kept)
    assert gate.find("key of new") is not None
    assert not kept.exists()


def test_without_kept_keys_a_wrong_file_is_refused(path: Path) -> None:
    path.write_text("broken")
    for kept in (None, path.parent / "kept.json"):
        with pytest.raises(StartupError, match="it is not JSON"):
            Gate(path, last_good=kept)


def test_work_is_metered_for_each_key_and_stays_so_when_the_file_is_read_again(path: Path) -> None:
    limits = {"requests_per_minute": 2, "concurrent_requests": 1}
    both = [entry("one", limits=limits), entry("two", limits=limits)]
    write(path, *both)
    gate = Gate(path, clock=lambda: 5.0)
    with metered(posted(gate, "one")), metered(posted(gate, "two")):
        gate.reload()
        with pytest.raises(APIError, match="at the same time"), metered(posted(gate, "one")):
            pass
    with metered(posted(gate, "one")):
        pass
    write(path, entry("one", limits=limits) | {"sha256": digest_of("key of other")})
    gate.reload()
    with pytest.raises(APIError, match="2 requests a minute"), metered(posted(gate, "other")):
        pass


def test_requests_that_ask_for_no_work_are_not_metered(path: Path) -> None:
    write(path, entry("one", limits={"requests_per_minute": 1}))
    gate = Gate(path)
    for place, method in [("/version", "GET"), ("/nothing", "POST"), ("/version", "POST")] * 3:
        request = requested(place, method, x_api_key="key of one")
        gate.identify(request)
        with metered(request):
            pass
    caller = caller_of(request)
    assert caller is not None
    assert caller.meter.headers()["x-ratelimit-remaining-requests"] == "1"
    with metered(requested("/v1/completions", "POST")):
        pass


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "192.168.0.1", "example.com", "", "127.0.0.1.nip.io"]))
