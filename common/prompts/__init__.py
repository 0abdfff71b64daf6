"""Prompts: choices by seeds and wildcards, parts and texts by step, weights and token ids, and the tokenizers."""
