"""Decides what the next step computes. Plain Python: decisions are made without tensors."""
