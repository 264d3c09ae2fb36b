"""From logits to the next token, and whether it was the last."""
