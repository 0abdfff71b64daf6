"""The load plan: for each parameter its source, storage dtype, LoRA deltas and residency. Reads headers and bytes."""
