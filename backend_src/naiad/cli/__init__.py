"""The command `naiad`: start and supervise a server, fetch the default model, measure."""
