"""Code that families of models share: components of a folder, text states, CLIP, the VAE, names of ldm files."""
