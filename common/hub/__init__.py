"""Finding of models on this machine by name, opening of them, and download of missing ones through `transfer`."""
