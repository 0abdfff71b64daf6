"""The processes that the server, a batch and rank 0 start: start, messages and end."""
