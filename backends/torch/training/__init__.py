"""Training of the built-in model, which is built on torch alone: what was trained runs on both backends."""
