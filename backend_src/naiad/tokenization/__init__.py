"""Text in and text out: token ids ↔ text, chat templates, stop strings."""
