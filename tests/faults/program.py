"""How each program here is called, and what it prints."""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any

Found = dict[str, Any]


def program(doc: str | None, run: Callable[..., Awaitable[Found]], is_fine: Callable[[Found], bool], **options: Any):
    """Call `run` with options from the command line, and a seed; print what it found as JSON, and exit with 0 if that
    is fine, else with 1. options: by name, what they are unless they are given."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in options.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(usual), default=usual, metavar="N", help=f"[default: {usual}]")
    parser.add_argument("--seed", type=int, default=None, help="[default: drawn]")
    args = vars(parser.parse_args())
    if args["seed"] is None:
        args["seed"] = random.randrange(2**32)

    async def found() -> Found:
        return await run(**args)

    result = asyncio.run(found())
    print(json.dumps(result, indent=2))
    sys.exit(0 if is_fine(result) else 1)
