"""What a user sends: prompts, images, and where everything of a request lies.

Messages, texts and pictures come in as callers have them; `access` says what may be read from where. Out go token ids
with the images beside them (`prompt`, `images`), pixels as patches (`processor`), and the layout of a request: tokens,
M-RoPE positions, spans of images (`layout`). All of it is numpy on the host. Nothing here knows of records, policies,
steps or devices.
"""
