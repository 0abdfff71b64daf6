"""Networks that predict a step: transformers and the UNet."""
