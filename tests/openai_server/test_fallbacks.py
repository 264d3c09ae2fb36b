"""Another model answers while the one that was asked cannot."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.sent_body import SentBody
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.errors import (
    ConfigError,
    EngineAwayError,
    EngineLostError,
    InternalError,
    InvalidRequestError,
    NaiadError,
    UnavailableError,
)
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.openai_server import generate
from naiad.openai_server.access.caller import Caller
from naiad.openai_server.access.key_file import Limits, new_key
from naiad.openai_server.access.rate_limits import Meter
from naiad.openai_server.api.reading import RequestReader
from naiad.openai_server.api.tally import SequenceDelta
from naiad.openai_server.app import ServerOptions, make_app
from naiad.openai_server.body_reader import BodyReader
from naiad.openai_server.engines.generation import Generation
from naiad.openai_server.engines.remote.models import RemoteServer
from naiad.openai_server.fallbacks import Fallbacks
from naiad.openai_server.generate import GenerateRoutes
from naiad.openai_server.route import BEGAN_S
from naiad.outputs import RequestOutput, Timings
from naiad.sequence import FinishReason
from naiad.tokenization import Tokenizer


class Finished(Generation):
    """Has one token and no more; or an error after the token, or at once."""

    def __init__(self, error: NaiadError | None, has_token: bool) -> None:
        super().__init__(1)
        if has_token:
            reason = None if error is not None else FinishReason.LENGTH
            self.add(SequenceDelta(0, "x", RequestOutput(1, [5], finish_reason=reason, timings=Timings())))
        if error is not None:
            self.fail(error)

    def close(self) -> None:
        pass


class FakeModel:
    """Answers with one token.

    Attributes:
        refuses: the error with which it does not take requests.
        fails: the error with which it ends them.
        has_token: whether a token comes before that.
        num_asked: requests that it has read.
        timeout_s: the time that the last of them had.
    """

    def __init__(self, reader: RequestReader, table: Any) -> None:
        self._reader = reader
        self._tokenizer = SimpleNamespace(table=table)
        self.refuses: NaiadError | None = None
        self.fails: NaiadError | None = None
        self.has_token = True
        self.num_asked = 0
        self.timeout_s: float | None = None

    async def loaded(self) -> Any:
        return SimpleNamespace(tokenizer=self._tokenizer)

    async def begin(self, _loaded: Any, read: Callable[[RequestReader], Any]) -> Any:
        asked = await asyncio.to_thread(read, self._reader)
        self.num_asked += 1
        self.timeout_s = asked.request.timeout_s
        if self.refuses is not None:
            raise self.refuses
        return asked, Finished(self.fails, self.has_token)


class Desk:
    """Two models, `first` with the fallback `second`, and a key with 100 tokens."""

    def __init__(self, directory: Path) -> None:
        tokenizer = Tokenizer.from_directory(write_tokenizer(directory, byte_level_tokenizer()))
        limits = ModelLimits(
            max_model_len=64, vocab_size=400, eos_token_ids=(1,), exclude_input_in_output=True
        )
        reader = RequestReader(PromptEncoder(tokenizer, 64, 400), limits)
        self.first, self.second = (FakeModel(reader, tokenizer.table) for _ in range(2))
        self.by_name = {"first": self.first, "second": self.second}
        self.away: NaiadError | None = None
        self.fallbacks = Fallbacks({"first": "second"})
        self.meter = Meter(Limits(tokens_per_minute=100), lambda: 0.0)
        # How long ago the headers of the next request came.
        self.age_s = 0.0

    def get(self, name: str) -> FakeModel:
        if name == "first" and self.away is not None:
            raise self.away
        return self.by_name[name]

    def ask(self, model: str = "first", **fields: Any) -> dict[str, Any]:
        async def answer() -> bytes:
            models: Any = SimpleNamespace(get=self.get, by_name=lambda: self.by_name)
            bodies = BodyReader(ThreadPoolExecutor(1), is_lenient=False)
            request: Any = SentBody({"model": model, "prompt": [5] * 10, "max_tokens": 1, **fields})
            request[BEGAN_S] = time.monotonic() - self.age_s
            watch: Any = SimpleNamespace(answer=_raw)
            routes = GenerateRoutes(models, bodies, watch, None, self.fallbacks)
            raw: Any = await routes.completion(request)
            await asyncio.sleep(0)
            return bytes(raw)

        return dict(json.loads(asyncio.run(answer())))

    @property
    def num_fallbacks(self) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in self.fallbacks.counted.samples())


async def _raw(_request: Any, raw: bytes) -> bytes:
    return raw


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    made = Desk(tmp_path)
    _, key = new_key("name", "tenant", "user")
    monkeypatch.setattr(
        generate, "caller_of", lambda _request: Caller(key, made.meter, b"secret", lambda _key: True)
    )
    return made


def test_the_first_one_answers_while_it_can(desk: Desk) -> None:
    assert desk.ask()["model"] == "first"
    assert desk.second.num_asked == desk.num_fallbacks == 0


@pytest.mark.parametrize("error", [UnavailableError("the queue is full"), EngineLostError()])
def test_a_refusal_makes_the_other_one_answer(desk: Desk, error: NaiadError) -> None:
    desk.first.refuses = error
    assert desk.ask()["model"] == "second"
    assert desk.num_fallbacks == 1
    desk.first.refuses = None
    assert desk.ask()["model"] == "first"
    assert desk.num_fallbacks == 1


def test_so_does_an_engine_that_is_away_or_gets_lost(desk: Desk) -> None:
    desk.away = EngineAwayError("restarting")
    assert desk.ask()["model"] == "second"
    desk.away = None
    desk.first.fails = EngineLostError()
    desk.first.has_token = False
    assert desk.ask()["model"] == "second"
    # Nothing of an unstreamed answer has been sent before it is whole.
    desk.first.has_token = True
    answer = desk.ask()
    assert (answer["model"], answer["choices"][0]["text"]) == ("second", "x")


@pytest.mark.parametrize("error", [InvalidRequestError("wrong"), InternalError("a bug")])
def test_other_errors_are_the_clients(desk: Desk, error: NaiadError) -> None:
    desk.first.refuses = error
    with pytest.raises(type(error)):
        desk.ask()
    assert desk.second.num_asked == 0


def test_nothing_falls_back_twice_or_without_being_told_to(desk: Desk) -> None:
    desk.first.refuses = UnavailableError("first")
    desk.second.refuses = UnavailableError("second")
    with pytest.raises(UnavailableError, match="second"):
        desk.ask()
    with pytest.raises(UnavailableError, match="second"):
        desk.ask("second")


def test_a_fallback_that_does_not_serve_leaves_the_error(desk: Desk) -> None:
    desk.first.refuses = UnavailableError("first")
    del desk.by_name["second"]
    with pytest.raises(UnavailableError, match="first"):
        desk.ask()
    assert desk.num_fallbacks == 0


def test_the_other_one_has_what_is_left_of_the_time(desk: Desk) -> None:
    desk.first.refuses = UnavailableError("the queue is full")
    desk.age_s = 9_000.0
    desk.ask(timeout_s=10_000)
    assert desk.second.timeout_s is not None
    assert 0 < desk.second.timeout_s <= 1_000


def test_a_request_whose_time_is_up_is_not_asked_again(desk: Desk) -> None:
    desk.first.refuses = UnavailableError("timeout")
    desk.age_s = 1.0
    with pytest.raises(UnavailableError):
        desk.ask(timeout_s=0.5)
    assert desk.second.num_asked == 0


def test_the_key_pays_for_its_prompt_once(desk: Desk) -> None:
    desk.first.refuses = UnavailableError("full")
    desk.ask()
    # Ten tokens of the prompt and the new one.
    assert desk.meter.headers()["x-ratelimit-remaining-tokens"] == "89"


@pytest.mark.parametrize("words", [["a"], ["a="], ["=b"], ["a=a"], ["a=b", "a=c"]])
def test_wrong_pairs_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--openai-fallback"):
        Fallbacks.parse("--openai-fallback", words)


def test_a_remote_server_is_asked_for_the_models_of_fallbacks(caplog: pytest.LogCaptureFixture) -> None:
    """A model may be loaded there later, so an unknown name is a warning."""

    async def start() -> None:
        remote: Any = RemoteServer(url="localhost:1", files=cast(Any, None))
        app = make_app(ServerOptions(remote=remote, fallbacks=Fallbacks({"first": "third"})), None)
        app.freeze()
        await app.startup()
        await app.cleanup()

    asyncio.run(start())
    lines = [record.getMessage() for record in caplog.records if "--fallback" in record.getMessage()]
    assert lines == [
        f"--fallback first=third: '{name}' is no model now (there are none), until the server loads it"
        for name in ("first", "third")
    ]
