"""The only room that knows Triton: life cycle of the models, requests in, responses out."""
