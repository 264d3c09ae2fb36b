"""The only package that knows Triton: the models' life cycle, request readers and response writers."""
