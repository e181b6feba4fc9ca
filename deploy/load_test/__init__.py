"""`intarsia bench serve`: load for any server of OpenAI's API, and what it made of it.

    shapes ─► sessions of turns ─► drive ─► client ─► the server
                                     │         │
                                     └─ times of each turn ─► report ─► a table, JSON, a picture

A turn is one request. The turns of a session come one after another, each some time after the answer before.
"""
