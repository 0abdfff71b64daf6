"""Token ids and weights of prompts, and the tokenizers that give them."""
