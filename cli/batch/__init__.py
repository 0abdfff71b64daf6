"""The pictures of a file of requests, drawn by several workers, each once however often the run is interrupted."""
