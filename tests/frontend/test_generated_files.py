"""What is written from the tables is what is committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from naiad.frontend.compatibility_tables import with_tables
from naiad.frontend.generate import generated_files
from naiad.frontend.model_configs import Choices, config_text


@pytest.mark.parametrize("path", generated_files(), ids=lambda path: "/".join(path.parts[-2:]))
def test_the_committed_file_is_what_the_generator_writes(path: Path) -> None:
    assert path.read_text() == generated_files()[path], "run `make generated`"


def test_a_page_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one table .* in the section `ensemble`, found 0"):
        with_tables("## `ensemble`\n\nNothing.\n\n## `tokenizer`\n")


def test_a_parameter_may_hold_any_text() -> None:
    text = 'a "quoted" \\ path\nof two lines, é'
    written = config_text("llm", Choices(parameters={"model_dir": text}))
    assert text_format.Parse(written, ModelConfig()).parameters["model_dir"].string_value == text
