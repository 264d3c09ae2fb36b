"""`naiad bench`: measures the engine's speed."""
