"""What all frontends share: the fields of a request, the tensors of a response, and their documentation.

A frontend translates between its client's format (tensors, parameters, JSON) and the types defined here.
This package uses neither Triton nor torch.
"""
