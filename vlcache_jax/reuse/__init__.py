"""Which tokens of known images are computed anew, and in how many layers.

A policy takes the layout of one request, in which every image is marked as miss, exact or approximate, and gives a
plan: the depth of each token (`policies`, `schedule`). What is decided only on the device, by looking at values, is
here too (`selection`), and so is the moving of linked K, V by what the computed tokens show (`shift`). `parse_policy`
reads what users write as `reuse`. Nothing here knows of the batch, the pool, records or the cache: a request's plan
never depends on its neighbours.
"""
