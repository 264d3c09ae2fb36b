from __future__ import annotations

import random

import pytest

from naiad.openai_server.access.key_file import Limits
from naiad.openai_server.access.rate_limits import Bucket, Meter
from naiad.openai_server.api.errors import APIError


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 1e6

    def __call__(self) -> float:
        return self.now_s


def meter(clock: Clock | None = None, **limits: int) -> Meter:
    return Meter(Limits(**limits), clock or Clock())


def send(used: Meter) -> None:
    with used.running():
        pass


def refusal(used: Meter) -> APIError:
    with pytest.raises(APIError) as caught:
        send(used)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return caught.value


def test_a_minute_of_requests_may_come_at_once_and_then_one_at_a_time() -> None:
    clock = Clock()
    used = meter(clock, requests_per_minute=30)
    for _ in range(30):
        send(used)
    assert refusal(used).headers == {"Retry-After": "2"}
    clock.now_s += 1.9
    assert refusal(used).headers == {"Retry-After": "1"}
    clock.now_s += 0.1
    send(used)
    assert "30 requests a minute" in refusal(used).message


def test_retry_after_is_always_long_enough_and_never_a_whole_interval_too_long() -> None:
    draw = random.Random(3)
    for _ in range(300):
        clock, per_minute = Clock(), draw.randint(1, 500)
        used = meter(clock, requests_per_minute=per_minute)
        for _ in range(per_minute):
            send(used)
        clock.now_s += draw.random() * 0.9 * 60 / per_minute
        wait_s = int(refusal(used).headers["Retry-After"])
        assert wait_s - 1 < 60 / per_minute
        clock.now_s += wait_s
        send(used)


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    used = meter(clock, requests_per_minute=1)
    send(used)
    for _ in range(5):
        refusal(used)
    clock.now_s += 60
    send(used)


def test_tokens_beyond_the_bucket_are_a_debt() -> None:
    clock = Clock()
    used = meter(clock, tokens_per_minute=60)
    send(used)
    used.charge(100)
    used.charge(20)
    assert refusal(used).headers == {"Retry-After": "61"}
    assert "60 tokens a minute" in refusal(used).message
    clock.now_s += 61
    send(used)


def test_over_a_long_time_a_key_gets_its_rate() -> None:
    clock = Clock()
    used = meter(clock, tokens_per_minute=600)
    draw, total = random.Random(1), 0
    while clock.now_s < 1e6 + 3600:
        try:
            send(used)
        except APIError:
            clock.now_s += 0.5
        else:
            size = draw.randint(1, 3000)
            used.charge(size)
            total += size
    assert 600 * 60 <= total <= 600 * 61 + 3000


def test_requests_at_the_same_time() -> None:
    used = meter(concurrent_requests=2)
    with used.running(), used.running():
        assert refusal(used).headers == {"Retry-After": "1"}
        assert "2 requests at the same time" in refusal(used).message
    with pytest.raises(KeyError), used.running():
        raise KeyError
    assert used.num_running == 0
    with used.running(), used.running():
        refusal(used)


def test_a_request_refused_for_one_limit_is_not_counted_by_another() -> None:
    clock = Clock()
    used = meter(clock, requests_per_minute=2, concurrent_requests=1)
    with used.running():
        refusal(used)
    assert used.headers()["x-ratelimit-remaining-requests"] == "1"


def test_headers_name_the_limits_what_is_left_and_when_all_is_back() -> None:
    clock = Clock()
    used = meter(clock, requests_per_minute=60, tokens_per_minute=600)
    assert used.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "60",
        "x-ratelimit-reset-requests": "0ms",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "600",
        "x-ratelimit-reset-tokens": "0ms",
    }
    send(used)
    used.charge(4200)
    clock.now_s += 0.5
    found = used.headers()
    assert found["x-ratelimit-remaining-requests"] == "59"
    assert found["x-ratelimit-reset-requests"] == "500ms"
    assert found["x-ratelimit-remaining-tokens"] == "0"
    assert found["x-ratelimit-reset-tokens"] == "6m59.5s"


def test_a_key_without_limits_has_no_headers_and_is_never_refused() -> None:
    used = meter()
    for _ in range(1000):
        used.charge(10**9)
        send(used)
    assert used.headers() == {}


def test_new_limits_keep_what_was_used() -> None:
    clock = Clock()
    used = meter(clock, requests_per_minute=10, tokens_per_minute=10)
    for _ in range(10):
        send(used)
    used.charge(30)
    used.limit(Limits(requests_per_minute=20, tokens_per_minute=5))
    assert used.headers()["x-ratelimit-remaining-requests"] == "0"
    # A debt of 20 tokens, five a minute.
    assert used.headers()["x-ratelimit-reset-tokens"] == "5m0s"
    used.limit(Limits())
    send(used)


def test_a_smaller_bucket_is_not_fuller_than_it_can_be() -> None:
    bucket = Bucket(100, Clock()).resized(10)
    assert bucket.level == 10
