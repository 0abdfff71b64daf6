"""From the name of a model to a folder on this machine; the only network."""
