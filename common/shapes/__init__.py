"""The built-in model: what it draws, in which words, and the rules that judge its pictures."""
