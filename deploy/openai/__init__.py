"""OpenAI-compatible HTTP: what the field's clients send and expect, over one `FrontEnd`.

protocol.py      what requests and answers look like; the OpenAPI document is made of it
requests.py      from what was sent to what the engine is asked
completions.py   /v1/completions
chat.py          /v1/chat/completions
app.py           the routes, errors in OpenAI's shape, what else there is to ask
"""
