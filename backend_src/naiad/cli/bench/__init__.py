"""`naiad bench`: how fast the engine is."""
