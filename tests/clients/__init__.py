"""Real client programs, unmodified, each in an environment of its own, against a served model: `make test-clients`.

`table.py` says which, `environments.py` installs them, `programs/` holds what each one is asked to do, and `report.py`
writes what they answered to `docs/clients.md`.
"""
