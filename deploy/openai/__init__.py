"""OpenAI-compatible HTTP: what the field's clients send and expect, over one `FrontEnd`.

protocol.py      what requests and answers look like; the OpenAPI document is made of it
requests.py      from what was sent to what the engine is asked
answers.py       what all calls share: collecting and streaming answers, usage
completions.py   /v1/completions
conversation.py  a conversation by the model's template: what chat and responses share
tools.py         how an answer is made to be a call, and how a call is found in an answer
chat.py          /v1/chat/completions
responses.py     /v1/responses
response_items.py  the items of its answers, and their events
kept.py          responses that are kept or made in the background
stored.py        how they are kept on disk
app.py           the routes, errors in OpenAI's shape, what else there is to ask
"""
