"""HTTP server with the APIs of OpenAI and Anthropic.

Input: HTTP requests. Output: answers as JSON or as server-sent events, made from the deltas of `AsyncLLM`. This package
has the routes, keys, limits, streams and process control. `protocol` parses bodies and formats answers.
"""
