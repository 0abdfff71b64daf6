"""Runs of many images: options and prompt files, names of files, failures; recipes read back, also of other
programs."""
