"""A training run as data: options, files and checks, but no step of it."""
