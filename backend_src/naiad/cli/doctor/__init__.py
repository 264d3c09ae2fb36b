"""`naiad doctor`: what this machine offers, and what Naiad will use."""
