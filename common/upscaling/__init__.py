"""Pictures made larger by a network of the ESRGAN family."""
