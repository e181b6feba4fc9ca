"""How people reach the engine: command line, gRPC, the offline Python API, the demo."""
