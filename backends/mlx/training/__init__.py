"""Training of LoRAs on MLX."""
