"""From a prompt to token ids and weights."""
