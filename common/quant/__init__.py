"""Weights in fewer bits: what codes and scales mean in float32, the same bits everywhere. Arithmetic, no names."""
