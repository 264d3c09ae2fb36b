"""Language models of a Triton server that takes and returns text, over its gRPC streams."""
