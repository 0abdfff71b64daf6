"""8-bit pixels and latents, read from files and written to them."""
