"""Faults, tried on the real thing: real processes, real Ray, real gRPC, and streams that must not notice.

    make chaos                      kills and stops of workers, controllers and front ends under load

Each module here is a program that prints what it saw as JSON; `docs/reliability.md` keeps the figures. `service.py` has
what they share: an engine with its servers, and streams whose every token is known beforehand.
"""
