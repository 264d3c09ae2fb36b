# Triton loads `TritonPythonModel` from here.
from naiad.triton_server.detokenizer_model import DetokenizerModel as TritonPythonModel
