"""What chat and responses share: a conversation by the model's template, and what is said and called in its answers."""

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ...errors import InvalidRequest
from ...proto.reply import Delta
from ...proto.request import SamplingParams
from ..front_end.borders import Rendering
from ..front_end.front_end import Asked, FrontEnd
from ..front_end.json_pieces import CHARS_OF_A_VALUE
from .answer_reader import AnswerReader, CallIds, Said
from .answers import Counter, pieces
from .next_turn import AnsweredTurn, is_followed
from .protocol import ChatRequest
from .requests import (
    as_template_has,
    bad_token_ids,
    check_begin,
    check_model,
    check_streaming,
    in_own_words,
    options_of,
    sampling_of,
    shape_of,
    truncated,
    turns_aside,
)
from .tools import CallPiece, naming_tools, tool_use, wanted_tools


class AnswerPart(NamedTuple):
    """What came for one answer."""

    delta: Delta
    text: str  # without what is a call
    calls: list[CallPiece]
    has_called: bool = False  # with these pieces or earlier ones
    thoughts: str = ""  # before what is said and called

    @property
    def finish_reason(self) -> str | None:
        reason = self.delta.finish_reason
        return "tool_calls" if reason == "stop" and self.has_called else reason


class Rendered(NamedTuple):
    """A prompt, and what the template made it of."""

    prompt: list[int]
    turns: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    urls: list[str]  # of its images


class Conversation:
    """One request. `prepare`, then `say`."""

    def __init__(self, front_end: FrontEnd, body: ChatRequest, request_id: str, *, thoughts_come_back: bool = False):
        """thoughts_come_back: do clients of this interface send them with the next turn? Raises `InvalidRequest`, which
        names the field."""
        check_model(body.model, front_end.info.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise InvalidRequest(
                f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}, which mean "
                "the same; give one of them",
                field="max_tokens",
            )
        check_streaming(body)
        self._begins = check_begin(body.add_generation_prompt, body.continue_final_message)
        self.front_end = front_end
        self._body = body
        self._request_id = request_id
        self._use = tool_use(body, shape_of(front_end))
        self._asked: Asked | None = None
        self._prompt_end = ""  # its text, where it matters
        self._thoughts_come_back = thoughts_come_back
        self._answered: AnsweredTurn | None = None  # where the next turn is to be prepared

    async def prepare(self) -> None:
        """The template is applied, images are looked at. Raises `InvalidRequest`, or `Overloaded` where that would be
        in vain."""
        body, front_end = self._body, self.front_end
        options = options_of(body)
        front_end.check_room(options.tenant)
        rendered = await self._rendered(is_cut=body.truncate_prompt_tokens is not None)
        if body.truncate_prompt_tokens is None:
            options = replace(options, borders=await self._borders(rendered))
        with in_own_words(body):
            images = await front_end.read_images(rendered.urls)
        # The prompt is cut where that is wanted; the answer has the rest, or what was asked for.
        longest, asked = front_end.info.longest_request, body.max_completion_tokens or body.max_tokens
        prompt = truncated(rendered.prompt, body, longest - (asked or 1))
        max_tokens = asked or max(1, longest - len(prompt))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        form = self._use.form if self._use else None
        prompt_end = self._prompt_end = self._ending(prompt)
        if form is not None and (grammar := self._grammar(prompt_end, must_call=True)) is not None:
            form = {"lark": grammar}
        bad = await bad_token_ids(front_end, body.bad_words)
        sampling = sampling_of(body, front_end.info, max_tokens, logprobs, form, bad, shape_of(front_end))
        # Calls of strict tools are held to their schemas, whether there are some or not.
        if sampling.form is None and self._is_strict:
            grammar = self._grammar(prompt_end, must_call=False)
            sampling = replace(sampling, lark=grammar)
        sampling = self._with_ends(sampling)
        self._asked = Asked(prompt, sampling, images, options, self._request_id, front_end.answer_format.markers)
        if front_end.next_turns is not None and is_followed(body, rendered.urls):
            self._answered = AnsweredTurn(rendered.turns, self._asked, thoughts_come_back=self._thoughts_come_back)
            self._render = self._rendering(rendered)

    def _ending(self, prompt: Sequence[int]) -> str:
        """The end of the prompt's text, where it matters."""
        tokenizer = self.front_end.tokenizer
        if tokenizer is None or self.front_end.answer_format.form is None:
            return ""
        return tokenizer.ending(prompt)

    @property
    def _is_strict(self) -> bool:
        return self._use is not None and any(tool.function.strict for tool in self._use.tools)

    def _grammar(self, prompt_end: str, *, must_call: bool) -> str | None:
        """Of calls as the model writes them, after its thoughts. None: the format has none for these tools."""
        use = self._use
        assert use is not None, "there are tools"
        is_parallel = self._body.parallel_tool_calls is not False and use.called is None
        return self.front_end.answer_format.grammar(
            wanted_tools(use), prompt_end, is_parallel=is_parallel, must_call=must_call
        )

    def _with_ends(self, sampling: SamplingParams) -> SamplingParams:
        """An answer ends where its format says so: with a call, too, which not every model's end tokens tell."""
        ends = self.front_end.answer_format.ends.keys() - {*self.front_end.info.eos_token_ids}
        if sampling.ignore_eos or not ends:
            return sampling
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *sorted(ends)))

    async def count(self) -> int:
        """Tokens of the prompt, which may be more than the model takes. Raises `InvalidRequest`."""
        return len((await self._rendered(is_cut=True)).prompt)

    async def _rendered(self, *, is_cut: bool) -> Rendered:
        """is_cut: it may be longer than the model takes."""
        body, front_end = self._body, self.front_end
        turns, urls = await turns_aside(front_end, body.messages)
        variables = dict(body.chat_template_kwargs or {})
        for name in ("reasoning_effort", "verbosity"):
            if (value := getattr(body, name)) is not None:
                variables.setdefault(name, value)
        tools = as_template_has(self._use.tools) if self._use else []
        prompt = await front_end.encode_chat(
            turns,
            tools,
            variables,
            add_generation_prompt=self._begins,
            continue_final_message=bool(body.continue_final_message),
            is_cut=is_cut,
        )
        return Rendered(prompt, turns, tools, variables, urls)

    async def _borders(self, rendered: Rendered) -> tuple[int, ...]:
        """Where other conversations are likely to part from this one."""
        about = rendered.tools, rendered.variables
        return await self.front_end.borders.of(rendered.turns, about, rendered.prompt, self._rendering(rendered))

    def _rendering(self, rendered: Rendered) -> Rendering:
        """Of other conversations with the same tools and variables."""
        tools, variables, encode = rendered.tools, rendered.variables, self.front_end.encode_chat

        async def render(others: Sequence[Mapping[str, Any]]) -> list[int]:
            return await encode(others, tools, variables)

        return render

    @property
    def asked(self) -> Asked:
        assert self._asked is not None, "prepare first"
        return self._asked

    @property
    def must_call(self) -> bool:
        """Must an answer consist of calls?"""
        return self._use is not None and self._use.form is not None

    async def parts(self, counter: Counter, *, is_streaming: bool) -> AsyncGenerator[AnswerPart, None]:
        """The pieces of all answers in one stream. Counts them."""
        readers = self._readers()
        is_single = self._body.parallel_tool_calls is False
        with in_own_words(self._body), naming_tools(self._use) if self._use else contextlib.nullcontext():
            async for piece in pieces(self.front_end, [self.asked], is_streaming=is_streaming):
                counter.add(piece)
                reader = readers[piece.delta.answer]
                size = len(piece.text) // CHARS_OF_A_VALUE
                said = await self.front_end.aside(size, partial(reader.push, piece.text))
                if piece.delta.finish_reason is not None:
                    rest = reader.finish()
                    said = Said(said.thoughts + rest.thoughts, said.text + rest.text, said.calls + rest.calls)
                    counter.add_thoughts(await self._thought_tokens(reader))
                calls = [call for call in said.calls if call.place == 0] if is_single else said.calls
                part = AnswerPart(piece.delta, said.text, calls, reader.has_called, said.thoughts)
                if self._answered is not None:
                    self._answered.add(piece.delta, part.thoughts, part.text, calls, part.finish_reason)
                yield part
        if self._answered is not None and (whole := self._answered.whole()) is not None:
            assert self.front_end.next_turns is not None, "next turns are not prepared here, so no answer is collected"
            self.front_end.next_turns.expect(whole, self._render)

    def _readers(self) -> list[AnswerReader]:
        """One for each answer."""
        asked, served = self.asked, self.front_end.answer_format
        sampling = asked.sampling
        is_formed = sampling.form is not None and sampling.lark is None
        ids = CallIds(served, self._body.messages)
        return [
            AnswerReader(served, self._use, self._prompt_end, is_formed=is_formed, ids=ids) for _ in range(sampling.n)
        ]

    async def _thought_tokens(self, reader: AnswerReader) -> int:
        """How many tokens an answer's thoughts are, as the tokenizer cuts them."""
        if not reader.thoughts:
            return 0
        return len(await self.front_end.encode(reader.thoughts, add_special_tokens=False, only_counted=True))
