"""Work beyond one picture, apart from the command line: the recipes of other programs."""
