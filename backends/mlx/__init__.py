"""MLX: on Apple silicon, and wherever else MLX runs."""
