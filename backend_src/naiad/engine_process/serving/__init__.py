"""The inside of the engine process: its socket, the gate of its queue, and the loop that runs steps."""
