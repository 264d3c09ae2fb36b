"""The command `naiad`: serves models, manages repositories, fetches the default model and measures speed."""
