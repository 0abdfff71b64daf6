"""LoRA files: their modules, names of layers, and deltas of weights."""
