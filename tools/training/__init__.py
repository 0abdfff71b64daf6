"""Training of the built-in model: data, three stages, and the files that each writes. `tools/train.py` runs it."""
