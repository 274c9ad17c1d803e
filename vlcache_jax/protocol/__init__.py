"""OpenAI's requests and answers as JSON.

In flow the bodies that clients and batch files hold; out flow conversations with their sampling parameters, and, for
what the engine tells of them, the objects that answer. Nothing here knows of HTTP or of files.
"""
