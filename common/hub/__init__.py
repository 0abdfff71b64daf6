"""Finding of models on this machine by name, and download of missing ones; only this room uses the network."""
