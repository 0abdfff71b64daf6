"""The structure of picture files, read before anything is decoded."""
