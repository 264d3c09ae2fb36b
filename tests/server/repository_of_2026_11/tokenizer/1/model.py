# Triton loads `TritonPythonModel` from here.
from naiad.triton_server.tokenizer_model import TokenizerModel as TritonPythonModel
