from __future__ import annotations

import pytest

from naiad.errors import ConfigError
from naiad.triton_server.models.parameters import read_count


def test_count_is_read_and_nothing_means_none() -> None:
    assert [read_count({"n": text}, "n") for text in ("7", "0", "")] == [7, 0, 0]
    assert read_count({}, "n") == 0


@pytest.mark.parametrize("text", ["-1", "1.5", "many", "²"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="n = "):
        read_count({"n": text}, "n")
