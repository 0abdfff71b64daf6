"""From prompts to text states: tokenizers, templates, weights, files."""
