"""Files of weights, by their headers: where each tensor lies, in which dtype and shape; safetensors and GGUF."""
