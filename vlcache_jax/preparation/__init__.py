"""What is asked, what is known, what is to be computed: from prompts to sequences that can run.

A call's prompts come in, each with its policy; what runs for them goes out. `identification` finds out which images
the prompts show, `recognition` those of one picture or video, of which `media` knows the head; `planner` which of them
are known, and gives what will be computed its place in the cache, where `costs` says whether what is stored is worth
its way; `sequences` makes of a planned request what the engine runs.
"""
