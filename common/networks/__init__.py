"""One file per network, data only: its configuration, the shapes of its tensors, and how its forward uses them."""
