# Triton loads `TritonPythonModel` from here.
from naiad.triton_server.llm_model import LLMModel as TritonPythonModel
