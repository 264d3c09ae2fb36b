"""Refuses requests of other sites' pages and requests without a key, and gives each failure an error body."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Collection

import msgspec
from aiohttp import web

from naiad.errors import NaiadError, place_of
from naiad.hosts import AllowedHosts
from naiad.openai_server.access.gate import Gate, caller_of, metered
from naiad.openai_server.api.anthropic import errors as anthropic
from naiad.openai_server.api.errors import APIError, api_error_of
from naiad.openai_server.protocol import check_target
from naiad.openai_server.route import CONTINUE
from naiad.tracing.trace_context import TraceContext, read_trace_context

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST_ID, _PARENT, _STATE = "x-request-id", "traceparent", "tracestate"
_MAX_REQUEST_ID = 200
_ID = web.RequestKey("id", str)
_JSON = "application/json"
_NOT_ENCODED = "identity"
_CHUNKED = "chunked"

logger = logging.getLogger(__name__)


def answer(error: APIError, request: web.Request) -> web.Response:
    """The response of an error, in the form of the request's API."""
    status, body = error.status, error.body
    if request.path.startswith(anthropic.PATH):
        status = anthropic.status_of(error)
        body = msgspec.json.encode(anthropic.body_of(error, request_id_of(request)))
    return web.Response(status=status, body=body, content_type=_JSON, headers=error.headers)


def request_id_of(request: web.Request) -> str:
    """The id of a request: the one that it was sent with, or a new one."""
    if _ID not in request:
        sent = request.headers.get(_REQUEST_ID, "")
        is_plain = sent.isascii() and sent.isprintable() and 0 < len(sent) <= _MAX_REQUEST_ID
        request[_ID] = sent if is_plain else f"req_{uuid.uuid4().hex}"
    return request[_ID]


def trace_of(request: web.Request) -> TraceContext:
    """The trace that a request belongs to."""
    sent = request.headers
    return read_trace_context(sent.getall(_PARENT, []), sent.getall(_STATE, []))


class Guard:
    """A middleware around every route."""

    def __init__(
        self, allowed_hosts: Collection[str], allowed_origins: Collection[str], gate: Gate | None = None
    ) -> None:
        """Set up.

        Args:
            allowed_hosts: names that a request's Host may have, besides addresses and localhost.
            allowed_origins: origins whose pages may call the server.
            gate: checks keys; None: nobody needs one.
        """
        self._gate = gate
        self._hosts = AllowedHosts(allowed_hosts)
        self._origins = frozenset(allowed_origins)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer the request, or refuse it; whatever fails becomes an error body."""
        try:
            self._check(request)
            with metered(request):
                response = await handler(request)
        except APIError as error:
            response = answer(error, request)
        except NaiadError as error:
            response = answer(api_error_of(error), request)
        except web.HTTPException as error:
            response = answer(_http_error(error, request), request)
        except Exception as error:  # noqa: BLE001 — a fault of ours fails this request alone
            parent = trace_of(request).parent
            trace = parent and f" ({parent})"
            identity = request_id_of(request)
            logger.error("a request failed%s [request id: %s]: %s", trace, identity, place_of(error))
            if request.writer.output_size and request.transport is not None:
                # A part of the answer has been sent: its client sees that it is not whole.
                request.transport.abort()
            response = answer(APIError(500, "internal error"), request)
        return response

    async def prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that every response has; a signal of aiohttp before headers are sent."""
        response.headers["Server"] = "naiad"
        response.headers[_REQUEST_ID] = request_id_of(request)
        if request.path.startswith(anthropic.PATH):
            response.headers[anthropic.REQUEST_ID] = request_id_of(request)
        caller = caller_of(request)
        if caller is not None:
            response.headers.update(caller.meter.headers())
        if self._origins:
            response.headers.add("Vary", "Origin")
        origin = request.headers.get("Origin")
        if origin in self._origins:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "*"
            if request.method == "OPTIONS":
                response.headers["Access-Control-Allow-Methods"] = "GET, POST"
                # Official clients send headers of their own.
                asked = request.headers.get("Access-Control-Request-Headers", "")
                response.headers["Access-Control-Allow-Headers"] = asked

    def _check(self, request: web.Request) -> None:
        """Refuse what a page of another site could send, and what its key does not allow.

        Raises:
            APIError: the Host is not known (a name that was bound again to this address), the key does not
                do, it expects what the server can not do, or the body is too large, compressed or not
                declared as JSON (which a page may send only to its own site).
        """
        check_target(request)
        hosts = [request.headers.get("Host", "")]
        if "://" in request.raw_path:
            # The host of a whole URL as the target counts more than the header.
            hosts.append(f"[{request.host}]" if ":" in request.host else request.host)
        for name in map(self._hosts.refused_name, hosts):
            if name is None:
                continue
            expected = "an address, localhost, or a name of --openai-allowed-host"
            message = f"Host = {name!r} is not allowed: expected {expected}."
            raise APIError(403, message, code="host_not_allowed")
        if request.method == "OPTIONS" and request.headers.get("Origin") in self._origins:
            raise web.HTTPNoContent
        if self._gate is not None:
            self._gate.identify(request)
        _refuse_too_large(request)
        if request.headers.get("Expect", CONTINUE).lower() != CONTINUE:
            message = f"Expect = {request.headers['Expect'][:80]!r}: expected {CONTINUE}."
            raise APIError(417, message)
        if request.method == "POST" and request.content_type != _JSON:
            message = f"Content-Type = {request.content_type[:80]!r}: expected {_JSON}."
            raise APIError(415, message, code="unsupported_media_type")
        encoding = request.headers.get("Content-Encoding", _NOT_ENCODED)
        if encoding.lower() != _NOT_ENCODED:
            message = f"Content-Encoding = {encoding[:80]!r}: expected a body that is not compressed."
            raise APIError(415, message, code="unsupported_media_type")
        coding = request.headers.get("Transfer-Encoding", _CHUNKED)
        if coding.lower() != _CHUNKED:
            message = f"Transfer-Encoding = {coding[:80]!r}: expected {_CHUNKED}."
            raise APIError(501, message)


def _refuse_too_large(request: web.Request) -> None:
    """Refuse a body by its Content-Length; the reader counts a body that comes in chunks."""
    num_bytes, largest = request.content_length or 0, request.client_max_size
    if num_bytes > largest:
        message = f"The body is too large: Content-Length = {num_bytes}: expected at most {largest} bytes."
        raise APIError(413, message, code="request_too_large", headers={"Connection": "close"})


def _http_error(error: web.HTTPException, request: web.Request) -> APIError:
    if error.status == 404:
        return APIError(404, f"{request.method} {request.path[:200]}: there is no such route.")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return APIError(405, f"{request.method} {request.path[:200]}: expected {allowed}.")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return APIError(413, f"The body is too large: {error.text}", code="request_too_large")
    return APIError(error.status, error.reason)
