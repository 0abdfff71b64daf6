"""The memory and time of an image, stage by stage, and the memory of this machine."""
