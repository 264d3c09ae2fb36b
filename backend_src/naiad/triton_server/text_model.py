"""The path that a repository's model.py imports; the class is in `models.text`."""

from naiad.triton_server.models.text import TextModel as TextModel
