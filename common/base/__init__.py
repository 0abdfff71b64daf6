"""Helpers that need no array and no model: errors, text, amounts, checked files and JSON, the place of the Hugging Face
cache."""
