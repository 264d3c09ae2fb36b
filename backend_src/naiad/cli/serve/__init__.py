"""`naiad serve`: starts a tritonserver, watches it, restarts it and stops it."""
