"""What three replicas have to do behind any proxy."""

from __future__ import annotations

import random
import statistics
import string
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from helpers.openai_api import address
from helpers.proxy_load import Answer, Load, complete, endless, failed, random_text
from helpers.replicas import NUM_REPLICAS, Proxy, Replicas
from helpers.server import Server, eventually

NUM_CLIENTS = 6
# A prompt's length in characters, which are tokens of the tiny model.
_PROMPT_CHARS = 2000
_TURN_CHARS = 200
_NUM_TURNS = 3
_NUM_CONVERSATIONS = 12
# Enough that a stream still runs when its replica is lost.
_LONG_TOKENS = 1500
# Sequences that fill an engine of the tests' repository, and those that may wait there.
NUM_RUNNING, NUM_WAITING = 4, 4


def gained(before: list[int], after: list[int]) -> list[int]:
    """What was added to each."""
    return [now - then for then, now in zip(before, after, strict=True)]


def check_load_is_spread(replicas: Replicas, proxy: Proxy) -> None:
    """Each replica gets a share of what clients ask for."""
    before = replicas.served()
    with Load(proxy.address, NUM_CLIENTS, max_tokens=24) as load:
        eventually(lambda: len(load.answers) >= 60, 120)
    shares = gained(before, replicas.served())
    print(f"requests of each: {shares}")
    assert failed(load.answers) == []
    assert sum(shares) == len(load.answers)
    assert min(shares) >= 0.2 * sum(shares)


def check_sessions_stay(replicas: Replicas, proxy: Proxy) -> None:
    """Requests of one session go to one replica, and sessions to different ones."""
    chosen = set()
    for session in range(8):
        before = replicas.served()
        answers = [complete(proxy.address, "Hello", session=f"session {session}") for _ in range(3)]
        shares = gained(before, replicas.served())
        assert failed(answers) == []
        assert sorted(shares) == [0, 0, 3]
        chosen.add(shares.index(3))
    assert len(chosen) > 1


def hit_rate(proxy: Proxy, *, with_session: bool) -> float:
    """The share of what turns of conversations repeat that comes from a cache."""
    # Nobody has sent the same prompts before.
    draw = random.Random(f"{proxy.plan.proxy} {proxy.plan.policy} {with_session}")

    def talk(number: int) -> list[Answer]:
        text, answers = "", []
        for turn in range(_NUM_TURNS):
            length = _TURN_CHARS if turn else _PROMPT_CHARS
            text += "".join(draw.choices(string.ascii_lowercase + " ", k=length))
            session = f"{proxy.plan.policy} {number}" if with_session else ""
            answers.append(complete(proxy.address, text, session=session, stream=True, max_tokens=2))
        return answers

    talks = [talk(number) for number in range(_NUM_CONVERSATIONS)]
    later = [answer for answers in talks for answer in answers[1:]]
    assert failed(later) == []
    repeated = [before.usage["prompt_tokens"] for answers in talks for before, _ in pairwise(answers)]
    rate = sum(answer.cached for answer in later) / sum(repeated)
    first_ms = statistics.median((answer.first_s - answer.began_s) * 1e3 for answer in later)
    how = "by session" if with_session else proxy.plan.policy
    print(
        f"{how}: {rate:.1%} of the repeated tokens were cached, median of the first bytes {first_ms:.0f} ms"
    )
    return rate


def check_busy_replica_passes_on(replicas: Replicas, proxy: Proxy) -> None:
    """A request that a full replica refuses is answered by another one."""
    full = address(replicas.servers[0])
    # Directly, so that the proxy knows nothing of them; slowly, so that they do not end meanwhile.
    with replicas.slow(0), endless(full, NUM_RUNNING + NUM_WAITING):
        # A question that came before the last of them would take its place.
        eventually(lambda: _num_requests(replicas.servers[0]) == NUM_RUNNING + NUM_WAITING, 60)
        assert _refuses(full)
        answers = [complete(proxy.address, "Hello", max_tokens=1) for _ in range(9)]
        assert _refuses(full)
    assert failed(answers) == []


def _num_requests(server: Server) -> float:
    return server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")


def _refuses(replica: str) -> bool:
    answer = complete(replica, "Hello", max_tokens=1)
    return answer.status == 503


def check_slow_replica_is_avoided(replicas: Replicas, proxy: Proxy, learns_for_s: float = 0.0) -> None:
    """A replica that takes far longer than others gets less to do, once the proxy knows it."""
    with replicas.slow(0), Load(proxy.address, NUM_CLIENTS, max_tokens=24) as load:
        time.sleep(learns_for_s)
        before, num_before = replicas.served(), len(load.answers)
        eventually(lambda: len(load.answers) >= num_before + 90, 180)
    shares = gained(before, replicas.served())
    print(f"{proxy.plan.policy}, requests of each, the slow one first: {shares}")
    assert failed(load.answers) == []
    # The others need not get equal shares: weights follow their own load.
    assert shares[0] < 0.5 * statistics.mean(shares[1:])


def check_lost_replica(replicas: Replicas, proxy: Proxy) -> None:
    """The streams that a lost replica had begun break off, and nothing else fails."""
    long = {"max_tokens": _LONG_TOKENS, "stream": True}
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        streams = [
            pool.submit(complete, proxy.address, random_text(f"story {number}", 40), **long)
            for number in range(NUM_CLIENTS)
        ]
        eventually(lambda: sum(replicas.running()) == NUM_CLIENTS, 60)
        shares = replicas.running()
        num_lost = max(shares)
        index = shares.index(num_lost)
        replicas.kill(index)
        with Load(proxy.address, 2, max_tokens=4) as load:
            eventually(lambda: len(load.answers) >= 40, 120)
        broken = failed([stream.result() for stream in streams])
    replicas.start(index)
    print(f"{num_lost} of {NUM_CLIENTS} streams were lost: {broken[0].error}")
    assert failed(load.answers) == []
    assert [answer.status for answer in broken] == [200] * num_lost


def check_rolling_restart(replicas: Replicas, proxy: Proxy) -> None:
    """Each replica is stopped and started again, and no client sees it."""
    with Load(proxy.address, NUM_CLIENTS, max_tokens=24) as load:
        for index in range(NUM_REPLICAS):
            replicas.restart(index)
            before = replicas.served()[index]
            eventually(lambda place=index, then=before: replicas.served()[place] > then, 60)
    print(f"{len(load.answers)} requests")
    assert failed(load.answers) == []
