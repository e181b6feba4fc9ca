"""What travels: the public protocol (`inference.proto`, generated code beside it) and the internal messages."""
