"""Calls of the Python API: from checked requests to results.

`caller` starts and ends the requests of a call, `groups` submits them in groups, `in_flight` admits and aborts the
requests of `AsyncLLM`, and `verification` compares outputs with a cold run.
"""
