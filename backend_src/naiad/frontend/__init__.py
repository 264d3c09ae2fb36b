"""What every frontend shares: the fields of a request, the tensors of a response, and their documents.

A frontend translates between its client's form (tensors, parameters, JSON) and what is typed here. No Triton
and no torch.
"""
