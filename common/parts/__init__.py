"""What families of models share: components of a folder, text states, CLIP, latents of a VAE, names of ldm files."""
