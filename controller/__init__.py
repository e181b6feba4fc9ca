"""The brain: which requests take part in a step, which blocks they get, and where their tokens go."""
