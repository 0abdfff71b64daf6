"""The one loop from a request to an image with its recipe; it knows no family."""
