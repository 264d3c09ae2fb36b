"""Model repositories: written, read and checked; `naiad repository`."""
