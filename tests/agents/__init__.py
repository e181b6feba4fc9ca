"""Folders of parser cases: what models of many families write, and what is to be read in it.

    python -m intarsia.tests.agents FOLDER

`cases.py` reads a folder, `cuts.py` cuts an output in every way, `compare.py` says what counts as the same, and
`__main__.py` prints how many were right. A folder `../templates` beside it is rendered, too.
"""
