"""The time to the first token of a next turn: with its history prepared, without, and of its own words alone.

    python bench/next_turns.py TEMPLATES [--model smollm2-135m-instruct] [--rounds 5]

TEMPLATES: a folder of chat templates, Jinja, with `conversation.json` beside it, as `tests/agents` reads them. For each
template that rewrites or leaves out something of the answer before the last user message, the engine has the prompt
and the answer as they were drawn; the history is prepared or not; then the next turn is asked for. "Alone" is a
prompt of the turn's own words and nothing else, which is the least that it could take. Prints a line for each
template, medians over the rounds in milliseconds, and one JSON object at the end.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from intarsia.deploy.checkpoints.real_models import real_checkpoint
from intarsia.deploy.front_end.borders import OTHER_WORDS, same
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import start_engine
from intarsia.errors import InvalidRequest
from intarsia.proto.request import RequestOptions, SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
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
    engine = await start_engine(engine_settings(args.model, kv_cache_memory=args.kv_cache_memory))
    messages = json.loads((args.templates.parent / "conversation.json").read_text())["messages"]
    plain = [each for each in messages if each["role"] != "tool" and not each.get("tool_calls")]
    told: dict[str, dict[str, float]] = {}
    try:
        for path in sorted(args.templates.glob("*.jinja")):
            try:
                turn = Turn(tokenizer, plain, path.read_text())
            except InvalidRequest:
                continue
            if turn.kept < min(len(turn.drawn), turn.border):
                told[path.stem] = await rounds(engine.client, turn, args.rounds, path.stem)
                print(f"{path.stem:36} {told[path.stem]}", flush=True)
    finally:
        await engine.shutdown()
    sums = {name: round(sum(each[name] for each in told.values()), 1) for name in next(iter(told.values()))}
    print(json.dumps({"benchmark": "next_turns", "model": args.model, "templates": len(told), **sums}))


async def rounds(client: Any, turn: Turn, count: int, name: str) -> dict[str, float]:
    times: dict[str, list[float]] = {"alone_ms": [], "prepared_ms": [], "unprepared_ms": []}
    for number in range(count + 1):
        measured = {}
        for way in times:
            salt = f"{name} {way} {number}"
            if way == "alone_ms":
                measured[way] = await first_token_ms(client, turn.asked[turn.border :], salt)
                continue
            await first_token_ms(client, turn.drawn, salt)
            if way == "prepared_ms":
                prompt = turn.asked[: turn.border + 1]
                await client.questions.prepare(prompt, "", salt, turn.kept, turn.drawn[turn.kept :])
            measured[way] = await first_token_ms(client, turn.asked, salt)
        if number:  # the first is for warming up
            for way, time_ms in measured.items():
                times[way].append(time_ms)
    medians = {way: round(statistics.median(each), 1) for way, each in times.items()}
    tokens = {"history": turn.border, "kept": turn.kept, "new": len(turn.asked) - turn.border}
    return {**tokens, **medians}


async def first_token_ms(client: Any, prompt: Sequence[int], salt: str) -> float:
    started = time.perf_counter()
    async for _ in client.generate(list(prompt), ONE, options=RequestOptions(salt=salt)):
        pass
    return (time.perf_counter() - started) * 1000


if __name__ == "__main__":
    main()
