"""What reuse and compression do to answers, and how schedules are found.

Works on the public engine, as a user's script would, and in places on its weights and programs. `questions` reads
files of benchmarks, and `scoring` says how right answers are. `accuracy` is the protocol: questions answered cold and
under every setting, in pairs. `probe`, `sensitivity`, `search` and `analysis` measure what each layer gains from
recomputing, find schedules, and look inside a model. `budgets` is the protocol of answers that go on with a part of
their prompt; `masked` computes such answers through masks, also for `baselines`, which the engine has not; `retention`
says what kept tokens hold of an answer's attention. `report` prints tables and writes JSON; `worklog` lets long work go
on where it stopped.
Nothing here knows of commands, and `scoring` alone knows particular data sets.
"""
