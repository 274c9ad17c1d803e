"""What a user sends: prompts, images, videos, and where everything of a request lies.

Messages, texts, pictures and videos come in as callers have them; `access` says what may be read from where. Out go
token ids with the images beside them (`prompt`, `images`, `videos`), pixels as patches (`processor`), of videos those
of the frames that are to be seen (`video_processor`; a call has settings of both, see `messages`), and the layout of a
request: tokens, M-RoPE positions, spans of images (`layout`). All of it is numpy on the host. Nothing here knows of
records, policies, steps or devices.
"""
