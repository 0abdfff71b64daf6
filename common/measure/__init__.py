"""Checks of what is claimed, such as that two backends are equal."""
