"""Code that families of models share: components, texts, CLIP and its tokenizer, VAE, ldm names, files to pull."""
