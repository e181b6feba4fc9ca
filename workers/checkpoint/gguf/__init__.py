"""GGUF files, whose weights are read where they lie.

`header.py` reads what a file says that it holds, `manifest.py` which tensors make a parameter of the model, and
`tensors.py` the bytes. Free of torch until a tensor is read.
"""
