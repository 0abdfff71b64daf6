"""The file of a passport: its content, its schema, and how it is read and written."""
