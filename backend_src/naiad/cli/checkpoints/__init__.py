"""Checkpoints on this machine: fetched, converted and checked."""
