"""/v1/completions: a prompt goes on."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ...errors import InvalidRequest
from ...proto.reply import num_values
from ..front_end.front_end import FEW_VALUES, SHORT_TEXT_CHARS, Asked, FrontEnd
from ..front_end.json_pieces import at_once
from .answers import (
    Counter,
    Piece,
    StreamUsage,
    as_json,
    now_s,
    pieces,
    plain,
)
from .logprobs import Spelling, of_completion, of_prompt
from .protocol import Completion, CompletionChoice, CompletionRequest
from .requests import (
    bad_token_ids,
    check_model,
    check_streaming,
    fingerprint_of,
    in_own_words,
    options_of,
    sampling_of,
    shape_of,
    truncated,
)

DEFAULT_MAX_TOKENS = 16


class CompletionCall:
    """One request, and the ways to answer it."""

    def __init__(self, front_end: FrontEnd, body: CompletionRequest, request_id: str):
        """Raises `InvalidRequest`, naming the field."""
        check_model(body.model, front_end.info.model)
        check_streaming(body)
        if body.best_of not in (None, body.n or 1):
            raise InvalidRequest("best_of is not supported beyond n: answers are not ranked here", field="best_of")
        if body.max_tokens == 0 and not body.echo:
            raise InvalidRequest("max_tokens is 0, so there is nothing to answer; give echo too", field="max_tokens")
        self.front_end = front_end
        self._body = body
        self._id = f"cmpl-{request_id}"
        self._request_id = request_id
        self._created = now_s()
        self._fingerprint = fingerprint_of(front_end.info)
        # With max_tokens 0 a token is drawn all the same, and not sent.
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        shaped = shape_of(front_end)
        self._sampling = sampling_of(body, front_end.info, max_tokens, body.logprobs, shaped=shaped)
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            self._sampling = replace(self._sampling, prompt_logprobs=body.logprobs)
        self._spelling = Spelling(front_end.tokenizer, bool(body.return_tokens_as_token_ids))
        self._asked: list[Asked] = []

    async def prepare(self) -> None:
        """Texts become tokens. Raises `InvalidRequest`, or `Overloaded` where that would be in vain."""
        given: Any = self._body.prompt
        if bad := await bad_token_ids(self.front_end, self._body.bad_words):
            self._sampling = replace(self._sampling, bad_token_ids=bad)
        options = options_of(self._body)
        self.front_end.check_room(options.tenant)
        # A prompt is a text or token ids; there may be several, up to a limit.
        is_one = isinstance(given, str) or isinstance(given[0], int)
        limit = self.front_end.limits.max_prompts
        if options.keep_s is not None and not is_one and len(given) > 1:
            raise InvalidRequest(
                f"keep_s keeps one conversation, and there are {len(given)} prompts; send one", field="keep_s"
            )
        if not is_one and len(given) > limit:
            raise InvalidRequest(
                f"a request may have {limit} prompts, this one has {len(given)}",
                field="prompt",
                asked=len(given),
                limit=limit,
            )
        # Texts become tokens. One that is to be cut may be longer than the model takes.
        is_cut = self._body.truncate_prompt_tokens is not None
        if isinstance(given, str):
            prompts = [await self.front_end.encode(given, only_counted=is_cut)]
        elif is_cut and isinstance(given[0], str):
            prompts = [await self.front_end.encode(each, only_counted=True) for each in given]
        elif isinstance(given[0], int):
            prompts = [list(given)]
        elif isinstance(given[0], str):
            prompts = await self.front_end.encode_all(given)
        else:
            prompts = [list(tokens) for tokens in given]
        # Prompts are cut to what leaves room for the answer, and each becomes a request.
        longest = self.front_end.info.longest_request - self._sampling.max_tokens
        prompts = [truncated(prompt, self._body, longest) for prompt in prompts]
        ids = [self._request_id if len(prompts) == 1 else f"{self._request_id}-{n}" for n in range(len(prompts))]
        self._asked = [
            Asked(prompt, self._sampling, (), options, own) for prompt, own in zip(prompts, ids, strict=True)
        ]

    async def answer(self) -> Completion:
        counter = Counter(self._asked)
        answers = [piece async for piece in self._pieces(counter, is_streaming=False)]
        answers.sort(key=self._index)

        def made() -> Completion:
            return Completion(
                id=self._id,
                created=self._created,
                model=self.front_end.info.model,
                system_fingerprint=self._fingerprint,
                choices=[self._choice(answer) for answer in answers],
                usage=counter.usage(),
            )

        return await self.front_end.aside(sum(map(self._size, answers)), made)

    async def events(self) -> AsyncGenerator[dict[str, Any] | str, None]:
        counter = Counter(self._asked)
        usage = StreamUsage(self._body.stream_options, counter)
        offsets: dict[int, int] = {}  # by index of the answer: characters sent
        body = self._body
        is_plain = body.logprobs is None and not (
            body.echo or body.return_token_ids or body.prompt_logprobs is not None
        )
        async for piece in self._pieces(counter, is_streaming=True):
            if piece.text or piece.delta.token_ids or piece.delta.finish_reason:
                if is_plain:
                    event = usage.put_into(self._event([self._entry(piece)]))
                    yield at_once(event) if len(piece.text) < SHORT_TEXT_CHARS else event
                else:
                    yield await self._rich_event(piece, offsets, usage)
        for event in usage.last(self._event([])):
            yield event
        yield "[DONE]"

    async def _pieces(self, counter: Counter, *, is_streaming: bool) -> AsyncGenerator[Piece, None]:
        """All pieces of all answers that the client is to see. Counts them."""
        with in_own_words(self._body):
            async for piece in pieces(self.front_end, self._asked, is_streaming=is_streaming):
                piece = self._without_unasked(piece)
                counter.add(piece)
                yield piece

    def _index(self, piece: Piece) -> int:
        """The place of its answer among all answers of all prompts."""
        return piece.prompt * self._sampling.n + piece.delta.answer

    def _entry(self, piece: Piece) -> dict[str, Any]:
        """The usual event, which has no extras. It is made for every token, so it takes little time."""
        return {
            "index": self._index(piece),
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.delta.finish_reason,
        }

    async def _rich_event(self, piece: Piece, offsets: dict[int, int], usage: StreamUsage) -> dict[str, Any] | str:
        index, size = self._index(piece), self._size(piece)
        offset, is_first = offsets.get(index, 0), index not in offsets

        def made() -> tuple[int, dict[str, Any] | str]:
            choice = self._choice(piece, offset=offset, is_first=is_first)
            entry = {name: value for name, value in plain(choice).items() if value is not None}
            event = usage.put_into(self._event([entry | {"finish_reason": piece.delta.finish_reason}]))
            return len(choice.text), as_json(event) if size >= FEW_VALUES else event

        sent, event = await self.front_end.aside(size, made)
        offsets[index] = offset + sent
        return event

    def _size(self, piece: Piece) -> int:
        """About how many values the piece brings."""
        delta = piece.delta
        values = num_values(delta.logprobs) + num_values(delta.prompt_logprobs) + len(delta.token_ids)
        tells_prompt = self._body.echo or self._body.return_token_ids
        return values + (len(self._asked[piece.prompt].prompt) if tells_prompt else 0)

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self.front_end.info.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _without_unasked(self, piece: Piece) -> Piece:
        """Leaves out the token that is drawn although `max_tokens` is 0."""
        if self._body.max_tokens != 0:
            return piece
        delta = piece.delta._replace(token_ids=(), logprobs=None, finish_reason=piece.delta.finish_reason and "length")
        return piece._replace(delta=delta, text="")

    def _choice(self, piece: Piece, *, offset: int = 0, is_first: bool = True) -> CompletionChoice:
        tokenizer, asked = self.front_end.tokenizer, self._asked[piece.prompt]
        text, delta = piece.text, piece.delta
        echoes = bool(self._body.echo) and is_first
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = of_completion(
                asked.prompt if echoes else None,
                delta.prompt_logprobs or (),
                delta.logprobs or (),
                self._spelling,
                offset,
            )
        if echoes:
            text = (tokenizer.decode(asked.prompt) if tokenizer is not None else "") + text
        wants_ids = bool(self._body.return_token_ids)
        about_prompt = delta.prompt_logprobs if self._body.prompt_logprobs is not None else None
        choice = CompletionChoice(
            index=self._index(piece),
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,  # type: ignore[arg-type]
            token_ids=list(delta.token_ids) if wants_ids else None,
            prompt_token_ids=asked.prompt if wants_ids and is_first else None,
        )
        # Afterwards, since pydantic would look at all of it in one step.
        choice.prompt_logprobs = of_prompt(about_prompt, self._spelling)  # type: ignore[assignment]
        return choice
