"""The one loop from a request to a picture with its recipe; names no family."""
