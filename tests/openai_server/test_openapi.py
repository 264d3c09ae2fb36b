"""The description of the routes: complete, true, and valid for what clients send."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from naiad.openai_server.api.bodies import REFUSED, parse_body
from naiad.openai_server.app import ServerOptions, make_app
from naiad.openai_server.openapi import document, with_description
from naiad.openai_server.route import ROUTES, Route


@pytest.fixture(scope="module")
def app() -> web.Application:
    return make_app(ServerOptions(server_pid=os.getpid()))


@pytest.fixture(scope="module")
def described(app: web.Application) -> dict[str, Any]:
    (route,) = [each for each in app[ROUTES] if each.path == "/openapi.json"]
    return sent_by(route.handler)


def sent_by(handler: Any) -> dict[str, Any]:
    """The JSON that a handler answers a request with."""
    answering = handler(None)
    with pytest.raises(StopIteration) as ended:
        answering.send(None)
    response = ended.value.value
    assert response.content_type == "application/json"
    return msgspec.json.decode(response.body)


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(each)


def test_it_has_every_route_and_no_other(app: web.Application, described: dict[str, Any]) -> None:
    served = {(route.method, route.resource.canonical) for route in app.router.routes()}
    # A route of GET also answers HEAD.
    served = {(method, path) for method, path in served if method != "HEAD"}
    assert {(method, path) for method, path, _ in operations(described)} == served
    assert ("POST", "/v1/chat/completions") in served


def test_every_reference_resolves(described: dict[str, Any]) -> None:
    references = {node["$ref"] for node in nodes(described) if "$ref" in node}
    assert "#/components/schemas/ChatBody" in references
    names = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert references <= names


def test_every_operation_says_what_goes_in_and_comes_out(described: dict[str, Any]) -> None:
    for method, path, operation in operations(described):
        assert operation["summary"].endswith("."), path
        assert ("requestBody" in operation) == (method == "POST"), path
        schema = operation["responses"]["default"]["content"]["application/json"]["schema"]
        name = "MessageError" if path.startswith("/v1/messages") else "ErrorBody"
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        names = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
        assert all(f"{{{name}}}" in path for name in names)
        assert path.count("{") == len(names)


def test_examples_are_read_by_the_bodies_that_they_describe(app: web.Application) -> None:
    with_bodies = [route for route in app[ROUTES] if route.body is not None]
    assert with_bodies
    for route in with_bodies:
        body, passed_over = parse_body(msgspec.json.encode(route.example), route.body, is_lenient=False)
        assert isinstance(body, route.body)
        assert not passed_over


def test_fields_that_are_refused_are_not_in_it_and_accepted_ones_are(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    assert schemas["ChatBody"]["additionalProperties"] is False
    chat = schemas["ChatBody"]["properties"]
    assert not REFUSED.keys() & chat.keys()
    assert {"messages", "temperature", "max_completion_tokens", "user", "metadata"} <= chat.keys()
    assert chat["store"]["enum"] == [False, None]
    assert schemas["ResponseBody"]["properties"]["store"]["enum"] == [False, True, None]
    # Completions have an echo; it is refused only of chats.
    assert "echo" in schemas["CompletionBody"]["properties"]


async def _nothing(_request: web.Request) -> web.Response:
    return web.Response()


def test_parts_of_a_path_and_queries_become_parameters() -> None:
    route = Route(
        method="GET", path="/a/{name:.+}/b", handler=_nothing, summary="Gets.", query={"model": "A name."}
    )
    (operation,) = document([route])["paths"]["/a/{name}/b"].values()
    path, query = operation["parameters"]
    assert (path["name"], path["in"], path["required"]) == ("name", "path", True)
    assert (query["name"], query["in"], query["required"]) == ("model", "query", False)
    assert query["description"] == "A name."


def test_an_answer_that_is_not_json_and_another_body_of_a_failure() -> None:
    route = Route(
        method="GET",
        path="/page",
        handler=_nothing,
        summary="Shows.",
        media_type="text/html",
        failures={503: dict[str, int]},
    )
    (operation,) = document([route])["paths"]["/page"].values()
    assert operation["responses"]["200"]["content"] == {"text/html": {"schema": {"type": "string"}}}
    schema = operation["responses"]["503"]["content"]["application/json"]["schema"]
    assert schema["additionalProperties"] == {"type": "integer"}


def test_the_description_describes_itself() -> None:
    (own,) = with_description([])
    assert list(sent_by(own.handler)["paths"]) == ["/openapi.json"]
