# Triton loads `TritonPythonModel` from here.
from naiad.triton_server.vllm_model import VLLMModel as TritonPythonModel
