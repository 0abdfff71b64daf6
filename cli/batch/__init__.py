"""Many pictures of a file of requests, by several workers, each drawn once however often the run is broken off."""
