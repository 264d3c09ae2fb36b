from __future__ import annotations

import pytest

from naiad.frontend.request import GenerateRequest, RequestedOutputs, RequestRow
from naiad.openai_server.access.caller import Caller
from naiad.openai_server.access.key_file import Limits, new_key
from naiad.openai_server.access.rate_limits import Meter
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.reading import AskedGeneration
from naiad.sequence import EngineRequest, SamplingParams


def caller(tenant: str = "acme", secret: bytes = b"s", highest_priority: int = 0) -> Caller:
    _, key = new_key("name", tenant, "user")
    limits = Limits(highest_priority=highest_priority)
    return Caller(
        key=type(key)(name="name", sha256=key.sha256, tenant=tenant, limits=limits),
        meter=Meter(limits, lambda: 0.0),
        _secret=secret,
        _knows=lambda _key: True,
    )


def asked(*salts: str, priority: int = 0) -> AskedGeneration:
    rows = [
        RequestRow(
            prompt_token_ids=[1],
            params=SamplingParams(max_tokens=1, priority=priority),
            text=None,
            cache_salt=salt,
        )
        for salt in salts
    ]
    return AskedGeneration(
        request=GenerateRequest(
            request_id="",
            rows=rows,
            timeout_s=None,
            streaming=False,
            exclude_input=True,
            outputs=RequestedOutputs(num_return_sequences=2),
        )
    )


def owned(by: Caller, *salts: str, priority: int | None = None) -> list[EngineRequest]:
    return by.own(asked(*salts, priority=priority or 0), priority).request.engine_requests(1)


def test_every_row_is_the_tenants() -> None:
    first, second = owned(caller(), "", "mine")
    assert (first.tenant, second.tenant) == ("acme", "acme")
    assert first.cache_salt != second.cache_salt


def test_a_salt_is_the_tenants_alone_and_cannot_be_named() -> None:
    salts = {
        request.cache_salt
        for each in (caller("acme"), caller("acm"), caller("acme", b"other"))
        for request in owned(each, "", "e", "e\0", "\0e", "acme", "\udcff")
    }
    assert len(salts) == 18
    assert all(len(salt) == 64 for salt in salts)
    (again,) = owned(caller("acme"), "e")
    assert again.cache_salt in salts


@pytest.mark.parametrize(
    ("highest", "sent", "found"), [(0, None, 0), (0, 0, 0), (0, 100, 100), (7, None, 7), (7, 7, 7), (7, 9, 9)]
)
def test_a_priority_is_the_requests_or_the_keys_highest(highest: int, sent: int | None, found: int) -> None:
    (request,) = owned(caller(highest_priority=highest), "", priority=sent)
    assert request.params.priority == found


@pytest.mark.parametrize(("highest", "sent"), [(0, -1), (0, -100), (7, 6), (7, 0)])
def test_no_priority_is_higher_than_the_keys(highest: int, sent: int) -> None:
    with pytest.raises(APIError, match=f"priority = {sent}: expected {highest} … 100") as caught:
        owned(caller(highest_priority=highest), "", priority=sent)
    assert (caught.value.status, caught.value.param) == (400, "priority")


def test_a_caller_does_not_show_its_secret() -> None:
    assert "secret" not in repr(caller(secret=b"secret"))
