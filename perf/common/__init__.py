"""Code shared by the measurements."""
