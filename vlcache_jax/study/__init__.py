"""What reuse does to answers, and how schedules are found.

Works on the public engine, as a user's script would, and in places on its weights and programs. `questions` reads
files of benchmarks, and `scoring` says how right answers are. `accuracy` is the protocol: questions answered cold and
under every setting; `pairs` compares these answers question by question. `probe` runs prompts densely, `sensitivity`
measures what each layer gains from recomputing, and `search` finds schedules. `calibration` measures what loading and
computing take. `report` prints tables, writes JSON, and lets long work go on where it stopped.
Nothing here knows of commands, and `scoring` alone knows particular data sets.
"""
