"""Training of the built-in model, on torch alone; the trained model runs on both backends."""
