"""How models write thoughts and calls of tools: one small description per format, and one parser that reads them all.

described.py   what a format is made of: markers, and the kind of thing between them
known.py       the formats that are known, each a description
chosen.py      which one a checkpoint has: by its template and its special tokens, or by a name
parser.py      text in, as it comes; thoughts, words and calls out
harmony.py     the one format that is no answer with calls in it, but messages on channels
"""
