"""What a training run is, as data: options, files and checks, but no step of it."""
