"""Processes that draw for the server, a batch or rank 0: how they start, how messages pass, how they end."""
