"""The path that a repository's model.py imports; the class is in `models.tokenizer`."""

from naiad.triton_server.models.tokenizer import TokenizerModel as TokenizerModel
