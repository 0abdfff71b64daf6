"""Requests to a hub, and downloads that resume; only this room uses the network."""
