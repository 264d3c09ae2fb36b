"""The path that a repository's model.py imports; the class is in `models.detokenizer`."""

from naiad.triton_server.models.detokenizer import DetokenizerModel as DetokenizerModel
