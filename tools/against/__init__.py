"""Our arm and a peer's, timed side by side on the same files and noise."""
