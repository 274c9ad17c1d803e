"""OpenAI's requests and answers as JSON. Nothing here knows of HTTP or of files."""
