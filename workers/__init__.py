"""The hands: one worker per GPU holds a shard of the model and of the shared pages, and runs the steps it is sent.

Nothing here imports torch before `Worker.load`, so that thread counts can be set first (`environment.py`).
"""
