"""Records requests as they go to the engine, with what came of them, in a file that `naiad replay` reads."""
