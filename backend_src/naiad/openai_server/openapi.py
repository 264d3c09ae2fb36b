"""`GET /openapi.json`: the description of all routes, made from the table and the types of bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

import naiad
from naiad.openai_server.api.bodies import ANY
from naiad.openai_server.api.errors import ErrorBody
from naiad.openai_server.route import JSON, Route

_OPENAPI_VERSION = "3.1.0"
_REFERENCE = "#/components/schemas/{name}"
_PART = re.compile(r"\{(\w+)(?::[^{}]+)?\}")
_EVENTS = "text/event-stream"

Json = dict[str, Any]


def with_description(routes: Sequence[Route]) -> list[Route]:
    """Return these routes and the one that describes all of them and itself."""

    async def describe(_request: web.Request) -> web.Response:
        return web.Response(body=encoded, content_type=JSON)

    own = Route(
        method="GET",
        path="/openapi.json",
        handler=describe,
        summary="Describes every route of this server.",
        answer=dict[str, Any],
    )
    described = [*routes, own]
    encoded = msgspec.json.encode(document(described))
    return described


def document(routes: Sequence[Route]) -> Json:
    """Make an OpenAPI document of these routes.

    Raises:
        TypeError: a body, answer or event is of a type that msgspec cannot describe.
    """
    types = _Types(routes)
    paths: dict[str, Json] = {}
    for route in routes:
        paths.setdefault(_PART.sub(r"{\1}", route.path), {})[route.method.lower()] = _operation(route, types)
    return {
        "openapi": _OPENAPI_VERSION,
        "info": {"title": "Naiad", "version": naiad.__version__},
        "paths": paths,
        "components": {"schemas": types.components},
    }


class _Types:
    """The schemas of all types that routes name."""

    def __init__(self, routes: Sequence[Route]) -> None:
        bodies = [route.body for route in routes if route.body is not None]
        others = [
            kind
            for route in routes
            for kind in (route.answer, route.event, route.failure, *route.failures.values())
            if kind is not None
        ]
        kinds = [*bodies, *others, ErrorBody]
        self._kinds = kinds
        self._schemas, self.components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
        for body in bodies:
            # The types hold what is served; these fields may be sent too, and change nothing.
            properties = self.components[body.__name__]["properties"]
            for name, values in body.others.accepted.items():
                properties.setdefault(name, _accepted(values))

    def schema(self, kind: Any) -> Json:
        """The schema of a type: a reference, unless it is one of Python's own."""
        return dict(self._schemas[self._kinds.index(kind)])


def _accepted(values: Sequence[Any]) -> Json:
    says = {"description": "Accepted; changes nothing."}
    return says if ANY in values else {**says, "enum": [*values, None]}


def _operation(route: Route, types: _Types) -> Json:
    parameters = [_parameter(name, "path") for name in _PART.findall(route.path)]
    parameters += [
        {**_parameter(name, "query"), "description": text, "required": False}
        for name, text in route.query.items()
    ]
    operation: Json = {"summary": route.summary, "responses": _responses(route, types)}
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content: Json = {"schema": types.schema(route.body)}
        if route.example:
            content["example"] = dict(route.example)
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    return operation


def _parameter(name: str, place: str) -> Json:
    return {"name": name, "in": place, "required": True, "schema": {"type": "string"}}


def _responses(route: Route, types: _Types) -> Json:
    content: Json = {}
    if route.answer is not None:
        content[JSON] = {"schema": types.schema(route.answer)}
    elif route.media_type:
        content[route.media_type] = {"schema": {"type": "string"}}
    success = {"description": "The request succeeded.", "content": content}
    if route.event is not None:
        content[_EVENTS] = {"schema": types.schema(route.event)}
        success["description"] = (
            f"The request succeeded. The schema of {_EVENTS} is that of each event's data."
        )
    responses: Json = {"200": success}
    for status, kind in route.failures.items():
        responses[str(status)] = _failure(types.schema(kind))
    return responses | {"default": _failure(types.schema(route.failure or ErrorBody))}


def _failure(schema: Json) -> Json:
    return {"description": "The request failed.", "content": {JSON: {"schema": schema}}}
