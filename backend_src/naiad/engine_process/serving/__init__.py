"""The inside of the engine process: its socket, the limit of its queue, and the loop that runs steps."""
