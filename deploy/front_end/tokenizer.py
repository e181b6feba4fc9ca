"""Text to tokens and back, and back again piece by piece while tokens stream in."""

import contextlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import CorruptCheckpoint, InvalidRequest, InvalidSetting, RequestTooLarge
from ...proto.worker import ModelSettings
from ...workers.checkpoint.json_file import clipped
from ...workers.checkpoint.side_files import check_side_files
from ..settings.limits import Limits
from .templates import LONGEST_COMPLAINT_CHARS, Question, Templates
from .text_bounds import TextBound, longest_token_bytes
from .token_bytes import half_character

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
"""A checkpoint with none of these has no tokenizer. Out of a tokenizer_config.json alone transformers may make one
with an empty vocabulary, to which every text is no tokens at all."""


MAX_TEMPLATE_CHARS = 2**20

LONG_DECODING_TOKENS = 1024
"""For more tokens, the tokenizer is called in a way that takes longer for few and lets other threads run meanwhile."""

ENDING_TOKENS = 32
"""Of a prompt, in which its beginning of a thought is."""

VARIABLES_THAT_ARE_PARAMETERS = {"documents", "reasoning_effort"}
"""Variables of templates that are not passed as such: `apply_chat_template` has parameters of these names, and hands
them on."""

OURS = {"self", "messages"}
"""Names that no template option may have beside those of parameters."""


def check_tokenizer(settings: ModelSettings) -> None:
    """Check the tokenizer's files without torch or transformers. Raises `CorruptCheckpoint` and `InvalidSetting`."""
    path = Path(settings.text_dir)
    if settings.tokenizer_dir is not None and not any((path / name).is_file() for name in FILES):
        raise InvalidSetting(
            f"tokenizer: {path} holds none of {', '.join(FILES)}. Give a folder with a tokenizer, or a name on the "
            "Hugging Face Hub whose files are here.",
            field="tokenizer",
        )
    check_side_files(path)
    if settings.chat_template is not None:
        read_template(settings.chat_template)
    if (path / "tokenizer.json").is_file() and not (path / "tekken.json").is_file():
        from tokenizers import Tokenizer as Backend

        try:
            Backend.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # it raises nothing else
            raise _unreadable(path, error) from error


def read_template(file: str) -> str:
    """A chat template in Jinja. Raises `InvalidSetting`."""
    try:
        with open(file, encoding="utf-8") as opened:
            template = opened.read(MAX_TEMPLATE_CHARS + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise InvalidSetting(f"chat_template: {file} cannot be read: {why}", field="chat_template") from None
    if not template.strip() or len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidSetting(
            f"chat_template: {file} {'is too long' if template.strip() else 'is empty'}; a template has 1 to "
            f"{MAX_TEMPLATE_CHARS} characters",
            field="chat_template",
        )
    from jinja2 import TemplateSyntaxError

    from .template_child import compiled

    try:
        compiled(template)
    except TemplateSyntaxError as error:
        raise InvalidSetting(
            f"chat_template: {file} is no Jinja template: {error.message} (line {error.lineno})", field="chat_template"
        ) from None
    return template


def _unreadable(path: Path, error: Exception) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"the tokenizer in {path} cannot be read: {clipped(str(error), 400)}", field="model")


class Tokenizer:
    """The tokenizer of a checkpoint directory. Any thread may ask."""

    def __init__(self, fast):
        self._fast = fast
        self._texts: dict[int, str] = {}  # of single tokens, those that were asked for
        self._templates = Templates()

    @classmethod
    def of(cls, settings: ModelSettings) -> "Tokenizer | None":
        """The one that a model is served with. Raises `CorruptCheckpoint` and `InvalidSetting`."""
        return cls.load(
            settings.text_dir, trust_remote_code=settings.trust_remote_code, chat_template=settings.chat_template
        )

    @classmethod
    def load(
        cls, model_dir: str | Path, *, trust_remote_code: bool = False, chat_template: str | None = None
    ) -> "Tokenizer | None":
        """None if the directory has no tokenizer files. Raises `CorruptCheckpoint` if they cannot be read.

        chat_template: a file, instead of the directory's own; raises `InvalidSetting` for one that is no template"""
        path = Path(model_dir)
        check_side_files(path)
        if not any((path / name).is_file() for name in FILES):
            return None
        from transformers import AutoTokenizer

        try:
            fast = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code, use_fast=True
            )
            fast.decode(fast.encode("a"))  # some values are looked at only then: better now than in each request
        except Exception as error:  # the tokenizers library raises bare Exception
            raise _unreadable(path, error) from error
        if chat_template is not None:
            fast.chat_template = read_template(chat_template)
        loaded = cls(fast)
        if chat_template is not None and loaded._has_chat_of_its_own:
            raise InvalidSetting(
                f"chat_template: the tokenizer in {path} puts conversations together by its own code, and not by a "
                "template; leave chat_template out",
                field="chat_template",
            )
        _ = loaded.longest_token_bytes  # goes through the vocabulary, which is not to be done for a request
        return loaded

    @property
    def has_chat(self) -> bool:
        """Whether conversations can become a prompt."""
        return bool(self._fast.chat_template) or self._has_chat_of_its_own

    @property
    def template(self) -> str | None:
        """The text of the chat template, that for tools where there are several. None: there is none."""
        if not self._fast.chat_template or self._has_chat_of_its_own:
            return None
        several = self._fast.chat_template
        if isinstance(several, str):
            return several
        return several.get("tool_use") or several.get("default")

    def special_tokens_of(self, texts: Sequence[str]) -> dict[int, str]:
        """Those of the texts that are one token each, added to the vocabulary, by token."""
        added = getattr(self._fast, "added_tokens_decoder", None) or {}
        wanted = frozenset(texts)
        return {token: text for token, each in added.items() if (text := str(getattr(each, "content", each))) in wanted}

    def ending(self, token_ids: Sequence[int]) -> str:
        """The text of the last tokens, special ones too."""
        last = list(token_ids[-ENDING_TOKENS:])
        return self._fast.decode(last, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens the model wants in front unless said otherwise. Raises `InvalidRequest`
        for a text that the tokenizers library breaks on: patterns give up over 10,000,000 blanks in a row."""
        try:
            return self._fast.encode(text, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's, of which there is no class to import
                raise
        raise InvalidRequest(
            f"the tokenizer cannot read this text of {len(text)} characters; is one of them there millions of times "
            "in a row?",
            field="prompt",
        )

    def encode_bounded(self, text: str, bound: TextBound, add_special_tokens: bool = True) -> list[int]:
        """Encode a text of any length. Raises `RequestTooLarge` for far more tokens than `bound` has, without making
        them all."""
        bound.check_tokens(text, lambda piece: len(self.encode(piece, add_special_tokens=False)), "prompt")
        return self.encode(text, add_special_tokens)

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """The most bytes of text in one token; None: no bound is known."""
        return longest_token_bytes(self._fast)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        if len(token_ids) > LONG_DECODING_TOKENS and self._decodes_as_its_backend:
            return self._fast.backend_tokenizer.decode_batch([list(token_ids)], skip_special_tokens=True)[0]
        return self._fast.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def text_of(self, token_id: int) -> str:
        """One token by itself, special ones too."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._fast.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character."""
        text = self.text_of(token_id)
        own = half_character(self._fast, token_id) if HALF in text else None
        return own if own is not None else text.encode()

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raises `InvalidRequest` for names that would be taken for parameters of the tokenizer's own function."""
        for name in variables:
            if name in self._parameters:
                raise InvalidRequest(
                    f"chat_template_kwargs may not set {name}, which is no variable of the template but an option of "
                    "the tokenizer, or a field of the request itself; leave it out",
                    field="chat_template_kwargs",
                )
        documents = variables.get("documents")
        is_list = isinstance(documents, list | tuple) and all(isinstance(each, Mapping) for each in documents)
        if documents is not None and not is_list:
            raise InvalidRequest(
                "documents in chat_template_kwargs must be a list of objects", field="chat_template_kwargs"
            )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        bound: TextBound | None = None,
        limits: Limits | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the model answers. The template runs in a process of its own.

        variables: for the template. add_special_tokens: beside those that the template writes. bound: of the rendered
        text. limits: of what it takes to render it.
        Raises `InvalidRequest` when the checkpoint has no template, or the template refuses the messages,
        `ContextTooLong` when their text is longer than the bound.
        """
        self.check_variables(variables or {})
        # Some models render conversations by code and not by a template.
        if self._has_chat_of_its_own:
            if add_special_tokens:
                raise InvalidRequest(
                    "this model's conversations have special tokens of their own; leave add_special_tokens out",
                    field="add_special_tokens",
                )
            options = {"continue_final_message": True} if continue_final_message else {}
            options |= {"add_generation_prompt": add_generation_prompt, **(variables or {})}
            return self._chat_of_its_own(messages, tools, options)
        # The others have a template, which runs in a child process within bounds.
        template = self._template(tools)
        given = {**self._fast.special_tokens_map, **(variables or {})}
        limits = limits or Limits()
        most = bound.max_bytes if bound is not None and bound.max_bytes is not None else limits.max_body_bytes
        question = Question(
            template, messages, list(tools) or None, given, add_generation_prompt, continue_final_message
        )
        try:
            text = self._rendered(question, limits, most)
        except RequestTooLarge:
            if bound is None or bound.max_bytes is None:
                raise
            what = f"the chat template makes a text of more than {most} bytes of these messages"
            raise bound.too_long(what, most + 1, "messages") from None
        # The rendered text is encoded; a bound keeps a long one from being encoded whole.
        if bound is None:
            return self.encode(text, add_special_tokens)
        return self.encode_bounded(text, bound, add_special_tokens)

    def _rendered(self, question: Question, limits: Limits, max_bytes: int) -> str:
        """The text of a conversation. A few templates take the arguments of calls as text alone: one that refuses them
        as objects gets them so."""
        try:
            return self._templates.render(question, limits, max_bytes)
        except RequestTooLarge:
            raise
        except InvalidRequest as refused:
            spelt = replace(question, messages=[_with_spelt_arguments(each) for each in question.messages])
            if spelt.messages == question.messages:
                raise
            with contextlib.suppress(InvalidRequest):
                return self._templates.render(spelt, limits, max_bytes)
            raise refused

    def _template(self, tools: Sequence[Mapping[str, Any]]) -> str:
        if not self._fast.chat_template:
            raise InvalidRequest("this checkpoint has no chat template; send the prompt as text", field="messages")
        try:
            return self._fast.get_chat_template(None, list(tools) or None)
        except ValueError as error:  # several, and none for all
            raise InvalidRequest(f"the chat template refuses these messages: {error}", field="messages") from None

    def _chat_of_its_own(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        """By a function that came with the checkpoint, or mistral-common's, neither of which is a template."""
        try:
            encoded = self._fast.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=True, **options
            )
        except Exception as error:  # noqa: BLE001  it raises what its author wrote
            why = str(error).replace(str(self._fast.name_or_path), "the checkpoint")[:LONGEST_COMPLAINT_CHARS]
            raise InvalidRequest(f"the chat template refuses these messages: {why}", field="messages") from None
        return list(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)

    @cached_property
    def _has_chat_of_its_own(self) -> bool:
        from transformers import PreTrainedTokenizerBase as Base

        own = type(self._fast)
        return own.apply_chat_template is not Base.apply_chat_template or (
            own.get_chat_template is not Base.get_chat_template
        )

    @cached_property
    def _decodes_as_its_backend(self) -> bool:
        from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

        own = type(self._fast)
        return own.decode is PreTrainedTokenizerBase.decode and own._decode is PreTrainedTokenizerFast._decode

    @cached_property
    def _parameters(self) -> frozenset[str]:
        """Names that are options of `apply_chat_template`, not variables."""
        from transformers import PreTrainedTokenizerBase as Base

        names = OURS.copy()
        for function in (Base.apply_chat_template, type(self._fast).apply_chat_template):
            names |= {
                each.name for each in inspect.signature(function).parameters.values() if each.kind != each.VAR_KEYWORD
            }
        return frozenset(names - VARIABLES_THAT_ARE_PARAMETERS)

    def stream(self) -> "TextStream":
        """A decoder for tokens that come one by one."""
        return TextStream(self)


HALF = "\N{REPLACEMENT CHARACTER}"
"""What bytes that are no character, or not yet one, become."""

LONGEST_CHARACTER_TOKENS = 4
"""It has four bytes."""

LONGEST_HALF_TOKENS = 16
"""So many tokens without the end of a character do not become one."""


class TextStream:
    """Turns tokens into text as they come. The pieces joined are the decoding of all tokens at once.

    One exception: where tokens stand for single bytes (`<0xE4>`) and these are not UTF-8, later bytes change how
    earlier ones decode. What was told stays told; the number of replacement characters may then differ.

    A token may end in the middle of a character, or change how the one before it is spelled. So text is only handed
    out up to a point behind which nothing changes: two decodings, one with and one without the new tokens, agree
    there. Only the tokens since that point are decoded again.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._settled = 0  # tokens before this one are no longer looked at
        self._sent = 0  # tokens whose text has been handed out

    def push(self, token_ids: Sequence[int]) -> str:
        """New text, which may be empty."""
        self._tokens += token_ids
        before, now = self._texts()
        if not now.endswith(HALF):
            return self._tell(len(self._tokens), before, now)
        if len(self._tokens) - self._sent > LONGEST_HALF_TOKENS:
            return self._tell_what_stays_broken(before, now)
        return ""  # in the middle of a character

    def finish(self) -> str:
        """The rest, be it half a character."""
        before, now = self._texts()
        self._settled = self._sent = len(self._tokens)
        return now[len(before) :]

    def _texts(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._tokens[self._settled : self._sent]), decode(self._tokens[self._settled :])

    def _tell(self, end: int, before: str, now: str) -> str:
        """now: the text up to token `end`."""
        if len(now) <= len(before):
            return ""
        self._settled, self._sent = self._sent, end
        return now[len(before) :]

    def _tell_what_stays_broken(self, before: str, now: str) -> str:
        """Bytes that are no character, for longer than any takes: else each token to come would decode them anew. What
        may yet become one is at the end, and is left there."""
        decode = self._tokenizer.decode
        end, text = len(self._tokens), now
        while text.endswith(HALF) and end > len(self._tokens) - LONGEST_CHARACTER_TOKENS:
            end -= 1
            text = decode(self._tokens[self._settled : end])
        return self._tell(end, before, text) if now.startswith(text) or not text.endswith(HALF) else ""


def text_notes(tokenizer: Tokenizer | None) -> Iterator[str]:
    """What a model cannot do for want of files beside its weights, for people."""
    if tokenizer is None:
        yield "no tokenizer: prompts and answers are token ids (return_token_ids); --tokenizer FOLDER gives it one"
    elif not tokenizer.has_chat:
        yield "no chat template: completions only, no chat; --chat-template FILE gives it one"


def _with_spelt_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same, with the arguments of its calls as JSON in a text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _spelt(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _spelt(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def encode_prompt(
    tokenizer: Tokenizer | None,
    text: str,
    model: str,
    add_special_tokens: bool = True,
    bound: TextBound | None = None,
) -> list[int]:
    """Token ids of a text prompt. Raises `InvalidRequest` when the model has no tokenizer, `RequestTooLarge` for far
    more tokens than `bound` has."""
    if tokenizer is None:
        raise InvalidRequest(f"{model} has no tokenizer, so it takes prompts of token ids only", field="prompt")
    if bound is None:
        return tokenizer.encode(text, add_special_tokens)
    return tokenizer.encode_bounded(text, bound, add_special_tokens)
