"""The path that a repository's model.py imports; the class is in `models.vllm`."""

from naiad.triton_server.models.vllm import VLLMModel as VLLMModel
