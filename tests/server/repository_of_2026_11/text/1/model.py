# Triton loads `TritonPythonModel` from here.
from naiad.triton_server.text_model import TextModel as TritonPythonModel
