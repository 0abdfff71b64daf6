"""Components on an engine: memory checks, loading, timing, freeing, and the search for values that are not finite."""
