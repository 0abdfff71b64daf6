"""Of every parameter where it is in which file, in which dtype it is kept, and when it is in memory; reads headers
and bytes."""
