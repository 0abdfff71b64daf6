"""Measures of a claim, such as that two backends are equal."""
