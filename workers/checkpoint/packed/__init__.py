"""Weights in fewer bits: how a checkpoint says so, and which tensors of its files make one weight. Free of torch.

`description.py` reads what a config says, `formats.py` finds packed weights by the tensors that are there.
`workers/models/unpacked.py` computes their numbers.
"""
