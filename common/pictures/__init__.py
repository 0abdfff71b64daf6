"""Reading and writing of 8-bit pixels and latents."""
