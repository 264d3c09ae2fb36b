"""What viewers of an engine are told, and what they are not."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest

from helpers.engine_views import info, snapshot
from naiad.openai_server.api.answers import encode
from naiad.openai_server.api.engine_view import EngineView, view_of, visible_rows
from naiad.outputs import EngineStats
from naiad.snapshot import BlockMap, EngineSnapshot, StepSummary, TenantShare, tenant_label


def view(*tenants: str, tenant: str = "", is_operator: bool = True) -> EngineView:
    return view_of(snapshot(*tenants), info(), "m", {1: "chatcmpl-1"}, tenant=tenant, is_operator=is_operator)


@pytest.mark.parametrize(
    ("tenant", "is_operator", "expected"),
    [
        ("", True, [1, 2, 3, 4]),
        ("a", True, [1, 2, 3, 4]),
        ("a", False, [1, 3]),
        ("b", False, [2]),
        ("nobody", False, []),
        # Who has no tenant is not the tenant without a name.
        ("", False, []),
        # A label is not a name.
        (tenant_label("a"), False, []),
    ],
)
def test_a_key_sees_its_own_rows(tenant: str, is_operator: bool, expected: list[int]) -> None:
    rows = visible_rows(snapshot("a", "b", "a", ""), tenant, is_operator)
    assert [row.sequence_id for row in rows] == expected


def test_a_key_sees_its_own_share() -> None:
    told = view("a", "b", "a", tenant="a", is_operator=False)
    assert [(each.tenant, each.running) for each in told.tenants] == [(tenant_label("a"), 2)]
    assert (told.running, told.requests_left_out) == (2, 0)
    assert tenant_label("b") not in encode(told).decode()
    assert view("a", "b", tenant="", is_operator=False).tenants == []


def test_what_other_tenants_do_changes_nothing_that_a_key_sees() -> None:
    busy = msgspec.structs.replace(
        snapshot("a", "b", "b", ""),
        stats=EngineStats(
            num_running=4, num_waiting=9, max_num_seqs=8, block_size=16, total_hit_tokens=50, total_steps=7
        ),
        num_rows_left_out=6,
        steps=[StepSummary(0.5, 100, 3, 0, 0, 1)],
        kv_groups=[BlockMap(None, 0, 0, 1, 3, 1, bytes([2, 3, 3, 3]))],
        prefill_tokens_per_s=500.0,
    )

    def told(seen: EngineSnapshot) -> EngineView:
        made = view_of(seen, info(), "m", {1: "chatcmpl-1"}, tenant="a", is_operator=False)
        return msgspec.structs.replace(made, time=0.0)

    assert told(busy) == told(snapshot("a"))
    assert told(busy).totals is None


def test_rows_that_were_cut_are_counted_for_their_tenant() -> None:
    cut = msgspec.structs.replace(
        snapshot("a", "b"), num_rows_left_out=50, tenants=[TenantShare(tenant_label("a"), 1, 3, 0)]
    )
    told = view_of(cut, info(), "m", {}, tenant="a", is_operator=False)
    assert told.requests_left_out == 3
    assert view_of(cut, info(), "m", {}, tenant="", is_operator=True).requests_left_out == 50


def test_requests_of_this_server_have_their_ids() -> None:
    assert [each.id for each in view("a", "b").requests] == ["chatcmpl-1", "#2"]


def test_the_document() -> None:
    told = json.loads(encode(view("a")))
    assert (told["started"], told["max_model_len"], told["running"]) == (100, 64, 1)
    (request,) = told["requests"]
    assert (request["state"], request["prompt_tokens"], request["output_tokens"]) == ("decode", 5, 2)
    assert (request["wait_s"], request["run_s"]) == (0.25, 1.5)
    told = told["totals"]
    assert told["steps"] == {
        "first": 40,
        "ms": [12.5, 500.0],
        "prefill_tokens": [5, 0],
        "decode_rows": [4, 4],
        "draft_tokens": [3, 0],
        "accepted_tokens": [2, 0],
        "preemptions": [1, 0],
    }
    assert base64.b64decode(told["kv"][0]["cells"]) == bytes(range(4))
    assert told["first_token"] == {"p50_ms": 250.0, "p95_ms": 500.0, "count": 4}
    assert told["inter_token"] == {"p50_ms": None, "p95_ms": None, "count": 0}
    assert told["output_tokens_per_s"] == 12.3
