"""Text to image with Qwen-Image on Apple Silicon (MLX) and NVIDIA (PyTorch)."""

__version__ = "0.1.0"
