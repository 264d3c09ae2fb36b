from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from helpers.sent_body import SentBody
from naiad.openai_server.api.bodies import DetokenizeBody
from naiad.openai_server.body_reader import BodyReader


def test_clients_cannot_make_the_server_remember_any_number_of_names() -> None:
    reader = BodyReader(ThreadPoolExecutor(1), is_lenient=True)
    names = [f"field{number}" for number in range(1000)] + ["x" * 10_000]
    request: Any = SentBody({"tokens": [1], **dict.fromkeys(names, 1)})
    for _ in range(2):
        assert asyncio.run(reader.read(request, DetokenizeBody)).tokens == [1]
    assert reader.passed_over["field0"] == 2
    assert len(reader.passed_over) == 101
    assert sum(reader.passed_over.values()) == 2 * len(names)
    assert max(map(len, reader.passed_over)) <= 80
