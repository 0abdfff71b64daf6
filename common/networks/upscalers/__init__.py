"""Networks that make a picture larger."""
