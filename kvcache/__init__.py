"""What the layers of a model keep in memory, and who holds which block. Python and numpy: no torch, no Ray, no I/O."""
