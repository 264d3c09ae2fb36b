"""The path that a repository's model.py imports; the class is in `models.llm`."""

from naiad.triton_server.models.llm import LLMModel as LLMModel
