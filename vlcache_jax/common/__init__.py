"""What every package may use: checks of values, JSON and other files, progress bars, names of vLLM."""
