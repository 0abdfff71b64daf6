"""One picture on several devices: all ranks compute the steps; rank 0 reads, decodes, writes and prints."""
