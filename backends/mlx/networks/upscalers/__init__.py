"""Networks between pixels and latents."""
