"""Which of a prompt's tokens answers go on with, once it is computed.

A policy (`policies`) says how many rows behind the prompt's last image are looked at, how many tokens each layer keeps
(`budgets`: host integers, from how sparse the layers' attention is), and how keys are ranked by the attention that they
received (`scores`: traced). `parse` reads what users write as `compress`. Nothing here knows of pages, programs or
other requests: what a request keeps depends on its own prompt alone.
"""
