"""The server for assistants: its tools, and the Model Context Protocol on standard input and output."""
