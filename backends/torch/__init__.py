"""PyTorch: on an NVIDIA GPU, and on any CPU."""
