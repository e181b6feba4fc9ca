"""Faults, tried on the real thing: real processes, real Ray, real gRPC, and streams that must not notice.

    make chaos                 kills and stops of workers, controllers and front ends under load
    make soak MINUTES=60       mixed use for a long time: memory, open files and threads must stay as they are
    fuzz.py                    malformed requests by the thousand, and forms of answers that are made to take for ever
    waves.py                   a thousand streams at once, half of them left at a random moment
    overload.py                ten times as many requests as can be served
    mixes.py                   ten thousand batches: what a request says must not depend on who is beside it
    unread.py                  clients that ask for much and read nothing, and a front end that is stopped
    tenants.py                 whether a tenant can find out what another one asked
    attacks.py                 what a client who means ill does to 16 ordinary streams, attack by attack
    fuzz_door.py               every route and RPC of a real server with keys, asked wrongly by the thousand
    siege.py                   attackers in turns for hours, and a worker killed every minute
    scarce.py                  too little address space, a full /dev/shm, a full disk

Each module here is a program that prints what it saw as JSON; `docs/reliability.md` keeps the figures. `service.py` has
what they share: an engine with its servers, and streams whose every token is known beforehand. The last four start
`intarsia serve` itself (`served.py`), of any checkout, and have their ordinary users in processes apart (`guests.py`).
An attack is a function in `attack_heads.py`, `attack_bodies.py` or `attack_holds.py`, registered under its name.
"""
