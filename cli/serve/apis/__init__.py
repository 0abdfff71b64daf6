"""The APIs over HTTP: OpenAI's, AUTOMATIC1111's and our own, and what they share."""
