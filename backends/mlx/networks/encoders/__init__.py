"""Networks that make states of texts and pictures."""
