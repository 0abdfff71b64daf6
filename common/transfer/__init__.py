"""Requests to a hub, downloads that resume, and removal of them; only this room uses the network."""
