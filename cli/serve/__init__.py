"""The HTTP server: pictures for programs and browsers. Its own process imports no framework; workers draw."""
