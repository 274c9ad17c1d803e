"""Request preparation: from prompts to sequences that can run.

A call's prompts come in, each with its options. `identification` finds the images of the prompts, `recognition` those
of one image or video, and `media` reads their heads. `planner` looks the images up, reserves the place of what will be
computed, and decides whether linking an image costs less than computing it. `sequences` makes of a planned request what
the engine runs.
"""
