"""Requests: each option as one field, LoRAs and few-step recipes by name; and the recipe of an image."""
