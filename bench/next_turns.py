"""The time to the first token of a next turn: with its history prepared, without, and of its own words alone.

    python bench/next_turns.py TEMPLATES [--model smollm2-135m-instruct] [--rounds 5] [--times 8] [--only Qwen3 GLM-4.5]

TEMPLATES: a folder of chat templates, Jinja, with `conversation.json` beside it, as `tests/agents` reads them. For each
template that rewrites or leaves out something of the answer before the last user message, an engine in this process
has the prompt and the answer as they were drawn; the history is prepared or not; then the next turn is asked for.
"Alone" is the same turn where the history has been asked for before, to its very end: its own words are all that is
computed. All texts are repeated `--times` times.

Prints a line for each template and one JSON object at the end: milliseconds of this process's CPU time, the least of
the rounds, so that others who use the machine matter little. Run it with OMP_NUM_THREADS=1.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from intarsia.controller.engine import Engine
from intarsia.deploy.checkpoints.real_models import real_checkpoint
from intarsia.deploy.front_end.borders import OTHER_WORDS, same
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.errors import InvalidRequest
from intarsia.proto.messages import Prepare
from intarsia.proto.request import RequestOptions, SamplingParams
from intarsia.tests.local import Completion, asking, make_engine

ONE = SamplingParams(temperature=0, max_tokens=1)

PAUSE_S = 0.05
"""Before each request, in which what the one before has left to do is done."""

WAYS = ("alone_ms", "prepared_ms", "unprepared_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--kv-cache-memory", default="256MiB")
    asyncio.run(measure(parser.parse_args()))


class Turn:
    """What was drawn, and what is asked next, of one template."""

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], template: str):
        """Raises `InvalidRequest`."""
        tokenizer._fast.chat_template = template
        last = len(messages) - 1
        prompt = tokenizer.chat(messages[: last - 1])
        whole = tokenizer.chat(messages[:last], add_generation_prompt=False)
        self.drawn = [*prompt, *whole[same(prompt, whole) :]]
        self.asked = tokenizer.chat(messages)
        self.border = same(self.asked, tokenizer.chat([*messages[:last], {**messages[last], "content": OTHER_WORDS}]))
        self.kept = same(self.drawn, self.asked)


async def measure(args: argparse.Namespace) -> None:
    found = real_checkpoint(args.model)
    folder = found.folder if found is not None else Path(args.model)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    engine = await make_engine(folder, kv_cache_memory=args.kv_cache_memory)
    serving = asyncio.ensure_future(engine.run())
    messages = json.loads((args.templates.parent / "conversation.json").read_text())["messages"]
    plain = [
        {name: value if name == "role" else " ".join([value] * args.times) for name, value in each.items()}
        for each in messages
        if each["role"] != "tool" and not each.get("tool_calls")
    ]
    told: dict[str, dict[str, float]] = {}
    for path in sorted(args.templates.glob("*.jinja")):
        with contextlib.suppress(InvalidRequest):  # it wants other conversations
            turn = Turn(tokenizer, plain, path.read_text())
            if (not args.only or path.stem in args.only) and turn.kept < min(len(turn.drawn), turn.border):
                told[path.stem] = await rounds(engine, turn, args.rounds, path.stem)
                print(f"{path.stem:36} {told[path.stem]}", flush=True)
    serving.cancel()
    sums = {name: round(sum(each[name] for each in told.values()), 1) for name in next(iter(told.values()))}
    print(json.dumps({"benchmark": "next_turns", "model": args.model, "templates": len(told), **sums}))


async def rounds(engine: Engine, turn: Turn, count: int, name: str) -> dict[str, float]:
    """By way, the least of `count` rounds; the first round is for warming up."""
    least = dict.fromkeys(WAYS, float("inf"))
    for number in range(count + 1):
        for way in WAYS:
            salt = f"{name} {way} {number}"
            await first_token_ms(engine, turn.asked[: turn.border] if way == "alone_ms" else turn.drawn, salt)
            if way == "prepared_ms":
                await prepare(engine, turn, salt)
            time_ms = await first_token_ms(engine, turn.asked, salt)
            if number:
                least[way] = round(min(least[way], time_ms), 1)
    return {"history": turn.border, "kept": turn.kept, "new": len(turn.asked) - turn.border, **least}


async def first_token_ms(engine: Engine, prompt: Sequence[int], salt: str) -> float:
    await asyncio.sleep(PAUSE_S)
    completion = Completion()
    started = time.process_time()
    engine.submit(asking(prompt, ONE, options=RequestOptions(salt=salt)), 0, completion.sink)
    await completion.done.wait()
    return (time.process_time() - started) * 1000


async def prepare(engine: Engine, turn: Turn, salt: str) -> None:
    done = asyncio.Event()
    wanted = Prepare(0, turn.asked[: turn.border + 1], "", salt, turn.kept, turn.drawn[turn.kept :])
    engine.preparing.take(wanted, lambda _: done.set())
    await done.wait()


if __name__ == "__main__":
    main()
