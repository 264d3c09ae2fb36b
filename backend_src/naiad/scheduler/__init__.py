"""Who computes what in the next step. Plain Python: decisions are made without tensors."""
