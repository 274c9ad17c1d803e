"""Requests and answers of the APIs of OpenAI and Anthropic as JSON.

Input: bodies of clients and of batch files, and the engine's outputs. Output: conversations with sampling parameters,
and answer objects. Independent of HTTP and of files.
"""
