"""Many requests from a file, to the last one: OpenAI's batch lines in, one result for each out.

lines.py      what a line asks, and what a result is
journal.py    results on disk as they come, so that nothing is lost and nothing is done twice
answering.py  a line answered by the very application that answers HTTP
run.py        `intarsia batch`: engines, progress, and the orderly end
ray_data.py   the same for a Ray Data pipeline
"""
