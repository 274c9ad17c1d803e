"""Studies: the accuracy of reuse, the search for schedules, and the calibration of loading.

Studies call the public engine, and in places its weights and programs. `questions` reads benchmark files, and `scoring`
scores answers. `accuracy` answers questions without reuse and under every setting, and `pairs` compares these answers
question by question. `probe` runs prompts densely, `sensitivity` measures the gain of each layer from recomputation,
and `search` finds schedules. `calibration` measures the times of loading and computing. `report` prints tables, writes
JSON, and resumes long work. This package does not import commands. Only `scoring` depends on particular data sets.
"""
