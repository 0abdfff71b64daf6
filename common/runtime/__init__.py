"""Components on an engine: whether they fit, loading, timing, freeing, the search for a value that is not finite."""
