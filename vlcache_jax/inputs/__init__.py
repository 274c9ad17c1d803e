"""Inputs of requests: prompts, images, videos and layouts.

`messages` reads messages, `images` and `videos` read media within the rules of `access`. `prompt` renders token IDs,
`expansion` expands the placeholders of media in them. `processor` and `video_processor` cut pixels into patches, and
`layout` has the tokens, M-RoPE positions and image spans of a request. Everything is numpy on the host. The package is
independent of cache entries, reuse policies, the engine and devices.
"""
