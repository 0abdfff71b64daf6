"""Runs of many images: options, prompt files, names of files, failures; and recipes, also of other programs."""
