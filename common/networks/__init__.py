"""One file per network, data only: its configuration, the shape of every tensor, and what the forward takes of them."""
