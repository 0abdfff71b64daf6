"""Prompts: their parts and texts by step, weights and token ids, and the tokenizers that give them."""
