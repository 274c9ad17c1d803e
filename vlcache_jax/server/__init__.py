"""OpenAI's API over HTTP.

In flow HTTP requests; out flow answers, whole or as server-sent events, made of what `AsyncLLM` yields. What a body
means and how an answer looks, `protocol` says; here stand routes, keys, limits, streams and the life of the process.
"""
