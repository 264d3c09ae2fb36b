"""Large bodies take turns, and small ones overtake them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp import ClientSession, web

from naiad.openai_server.api.bodies import TokenizeBody
from naiad.openai_server.body_reader import BodyReader
from naiad.openai_server.guard import Guard
from naiad.openai_server.large_bodies import LARGE_BYTES, HeldBody, LargeBodies, NoRoomError
from naiad.openai_server.route import Route, add_routes

PATIENCE_S = 60
MAX_BYTES = 3 * LARGE_BYTES
MIB = 1024 * 1024
JSON = "Content-Type: application/json\r\n"


class Time:
    """A clock that only moves while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)


def test_what_is_read_keeps_the_rate_of_all_bodies_together() -> None:
    async def test() -> None:
        time = Time()
        bodies = LargeBodies(clock=time.clock, sleep=time.sleep)
        await bodies.pace(16 * MIB)
        await bodies.pace(16 * MIB)
        time.now_s = 10.0
        await bodies.pace(32 * MIB)
        assert time.pauses_s == [0.5, 1.0, 1.0]

    asyncio.run(test())


def test_turns_do_not_overlap_and_end_with_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rests_s: list[float] = []
    num_inside = 0

    async def test() -> None:
        time = Time()
        bodies = LargeBodies(clock=time.clock)
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def call_later(delay_s: float, *call: object) -> asyncio.TimerHandle:
            rests_s.append(delay_s)
            return later(0, *call)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_later", call_later)

        async def one(seconds: float) -> None:
            nonlocal num_inside
            async with bodies.turn():
                num_inside += 1
                assert num_inside == 1
                time.now_s += seconds
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                num_inside -= 1

        await asyncio.gather(one(0.01), one(0.1), one(30.0))

    asyncio.run(test())
    assert rests_s == pytest.approx([0.02, 0.2, 0.5])


@pytest.fixture
def bodies() -> Iterator[BodyReader]:
    with ThreadPoolExecutor(2) as pool:
        yield BodyReader(pool, is_lenient=False)


class Door:
    """A server whose answer is the number of characters of a prompt; large ones can be held."""

    def __init__(self, bodies: BodyReader) -> None:
        self._bodies = bodies
        self.let_go = asyncio.Event()
        self.num_inside = 0
        self.most_inside = 0
        self._session = ClientSession()
        app = web.Application(middlewares=[Guard((), ()).middleware], client_max_size=MAX_BYTES)
        add_routes(app, [Route(method="POST", path="/tokenize", handler=self._handle, summary="")])
        self._runner = web.AppRunner(app)

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._runner.addresses[0]
        return host, port

    async def stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def send(self, num_chars: int, *, in_chunks: bool = False) -> tuple[int, bytes]:
        raw = json.dumps({"prompt": "x" * num_chars}).encode()
        host, port = self._runner.addresses[0]
        headers = {"Content-Type": "application/json"}
        body = _chunks(raw) if in_chunks else raw
        async with self._session.post(f"http://{host}:{port}/tokenize", data=body, headers=headers) as answer:
            return answer.status, await answer.read()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await self._bodies.read(request, TokenizeBody)
        assert body.prompt is not None
        async with self._bodies.turn(request):
            if len(body.prompt) >= LARGE_BYTES:
                self.num_inside += 1
                self.most_inside = max(self.most_inside, self.num_inside)
                await self.let_go.wait()
                self.num_inside -= 1
        return web.Response(text=str(len(body.prompt)))


async def _chunks(raw: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(raw), 10_000):
        yield raw[begin : begin + 10_000]


def test_bodies_share_the_room_and_give_it_back() -> None:
    bodies = LargeBodies(clock=Time().clock, max_held_bytes=100)
    first_part = bytes(LARGE_BYTES)
    with bodies.room() as first:
        first.add(first_part + b"x" * 60)
        with bodies.room() as second:
            second.add(first_part)
            second.add(b"y" * 40)
            with pytest.raises(NoRoomError):
                first.add(b"x")
            assert (first.data[-60:], second.data[-40:]) == (b"x" * 60, b"y" * 40)
            # Small ones always have room.
            with bodies.room() as small:
                small.add(first_part)
        first.add(b"x" * 40)
    with pytest.raises(NoRoomError), bodies.room() as third:
        third.add(first_part + b"z" * 101)
    with bodies.room() as fourth:
        fourth.add(first_part + b"z" * 100)


def test_too_much_at_a_time_is_refused_and_what_is_there_goes_on(
    bodies: BodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_large", LargeBodies(max_held_bytes=1050))

    async def test() -> None:
        door = Door(bodies)
        await door.start()
        cut_off = await asyncio.open_connection(*door.address)
        head = (
            f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {2 * LARGE_BYTES}\r\n\r\n"
        )
        cut_off[1].write(head.encode() + b" " * (LARGE_BYTES + 1000))
        while bodies._large._num_held_bytes < 1000:
            await asyncio.sleep(0.01)
        status, answer = await door.send(LARGE_BYTES + 100)
        assert (status, b"Too many large requests" in answer) == (503, True)
        assert await door.send(10) == (200, b"10")
        # What a client that leaves has sent is gone with it, although the garbage is not collected.
        held = next(each for each in gc.get_objects() if isinstance(each, HeldBody) and each.data)
        cut_off[1].transport.abort()
        while bodies._large._num_held_bytes:
            await asyncio.sleep(0.01)
        assert held.data == b""
        door.let_go.set()
        assert (await door.send(LARGE_BYTES))[0] == 200
        await door.stop()

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
    finally:
        gc.enable()


def test_small_bodies_overtake_large_ones(bodies: BodyReader) -> None:
    async def test() -> None:
        door = Door(bodies)
        await door.start()
        large = [asyncio.create_task(door.send(LARGE_BYTES + number)) for number in range(3)]
        while not door.num_inside:
            await asyncio.sleep(0.001)
        for _ in range(3):
            assert await door.send(5) == (200, b"5")
        assert not any(each.done() for each in large)
        door.let_go.set()
        answers = await asyncio.gather(*large)
        assert answers == [(200, str(LARGE_BYTES + number).encode()) for number in range(3)]
        assert door.most_inside == 1
        await door.stop()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


@pytest.mark.parametrize("in_chunks", [False, True])
def test_the_largest_body_is_read_and_a_larger_one_is_refused(bodies: BodyReader, in_chunks: bool) -> None:
    async def test() -> None:
        door = Door(bodies)
        door.let_go.set()
        await door.start()
        num_chars = MAX_BYTES - len(b'{"prompt": ""}')
        assert await door.send(num_chars, in_chunks=in_chunks) == (200, str(num_chars).encode())
        status, raw = await door.send(num_chars + 1, in_chunks=in_chunks)
        assert status == 413
        assert json.loads(raw)["error"]["code"] == "request_too_large"
        await door.stop()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
