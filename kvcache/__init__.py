"""What the layers of a model keep in memory, and who holds which block. Pure Python: no torch, no Ray, no I/O."""
