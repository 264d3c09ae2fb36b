"""Naiad client."""
