"""Is a family of models computed here as transformers computes it? A small copy of the model answers."""
