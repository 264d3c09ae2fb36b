"""Writers, one for each frontend: they turn the engine's outputs into responses."""
