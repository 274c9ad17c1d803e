"""Reuse policies: the tokens of cached images that are recomputed, and the number of layers.

A policy takes the layout of one request, in which every image is marked as miss, exact or approximate. It returns a
plan, the depth of each token (`policies`, `schedule`). `selection` has the policies that choose tokens on the device by
their values, and `parse_policy`, which reads the value of `reuse`. `shift` corrects linked KV by the mean change of the
recomputed tokens. This package does not import the batch, the KV pool or the cache. A request's plan does not depend on
other requests.
"""
