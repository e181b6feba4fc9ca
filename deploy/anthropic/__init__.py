"""Anthropic-compatible HTTP: `/v1/messages` in other words than chat, over the same conversation.

protocol.py    what requests and answers look like
translate.py   a request in the words of chat
blocks.py      an answer as blocks of content, whole or as events
messages.py    the two calls: an answer, and how many tokens a request has
errors.py      errors in Anthropic's shape
app.py         the routes
"""
