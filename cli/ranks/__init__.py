"""One picture on several devices: rank 0 reads, decodes, writes and prints; others compute its steps with it."""
