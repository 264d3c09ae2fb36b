"""Which blocks of the KV cache belong to whom. Numbers only: the tensors are the model runner's."""
