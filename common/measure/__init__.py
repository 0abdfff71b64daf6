"""Measurements: activations, precision and speed on this machine, and published speeds of others."""
