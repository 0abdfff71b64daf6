"""Conversion of a model to a folder: quantized, with LoRAs merged, or from another layout."""
