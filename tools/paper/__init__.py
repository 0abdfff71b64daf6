"""Kernels on paper: what one call of a network hands to a device, counted without running it."""
