"""The built-in model: its scenes and words, and the rules that judge its images."""
