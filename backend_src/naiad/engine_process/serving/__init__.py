"""Inside the engine process: the socket, the queue and the loop that steps the engine."""
