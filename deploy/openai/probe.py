"""The route for routers: what a request would meet at each engine, without sending it."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from ...errors import InvalidRequest
from ..front_end.front_end import FrontEnd
from .answering import ERRORS
from .protocol import EngineFigures, ProbeChat, ProbedEngine, ProbePrompt, ProbeRequest, Probes
from .requests import as_template_has, check_model, turns_aside


def add_probe(app: FastAPI, front_end: Callable[[], FrontEnd]) -> None:
    @app.post("/v1/probe", response_model=Probes, responses=ERRORS, operation_id="probe")
    async def probe(body: ProbeRequest) -> Probes:
        here = front_end()
        check_model(body.model, here.info.model)
        prompt = await _prompt(here, body)
        found = await here.probes.ask(prompt, body.cache_salt or "")
        engines = [
            ProbedEngine(engine=name, figures=None if probed is None else EngineFigures(**probed._asdict()))
            for name, probed in found
        ]
        return Probes(model=here.info.model, prompt_tokens=len(prompt), engines=engines)


async def _prompt(front_end: FrontEnd, body: ProbePrompt | ProbeChat) -> list[int]:
    """As the model would read it. Raises `InvalidRequest`."""
    if isinstance(body, ProbePrompt):
        return await front_end.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    turns, images = await turns_aside(front_end, body.messages)
    if images:
        raise InvalidRequest("prompts with images are not probed; leave the images out", field="messages")
    tools: list[dict[str, Any]] = as_template_has(body.tools or ())
    return await front_end.encode_chat(turns, tools, body.chat_template_kwargs)
