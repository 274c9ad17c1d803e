"""Calls of the Python API: from checked requests to results.

`caller` starts and ends the requests of a call, `groups` takes them in groups, `in_flight` admits and aborts requests
of programs that serve, and `verification` compares outputs with a cold run.
"""
