"""`intarsia replay`: the cache manager alone, without a model, over a trace. See docs/replay.md."""
