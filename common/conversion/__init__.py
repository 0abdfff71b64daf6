"""A model written again as a folder: in codes, with LoRAs in its weights, or from another layout."""
