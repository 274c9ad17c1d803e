"""Request preparation: from prompts to sequences that can run.

`identification` finds the images of a call's prompts, `recognition` those of one image or video, and `media` reads file
headers. `planner` looks the images up, reserves cache entries for what will be computed, and decides whether linking an
image costs less than computing it. `sequences` builds the sequences that the engine runs from a planned request.
"""
