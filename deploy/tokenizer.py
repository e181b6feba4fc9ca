"""Text to tokens and back, and back again piece by piece while tokens stream in."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CorruptCheckpoint, InvalidRequest
from ..workers.json_file import clipped
from ..workers.side_files import check_side_files

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
"""A checkpoint with none of these has no tokenizer. Out of a tokenizer_config.json alone transformers may make one
with an empty vocabulary, to which every text is no tokens at all."""


class Tokenizer:
    """The tokenizer of a checkpoint directory."""

    def __init__(self, fast):
        self._fast = fast

    @classmethod
    def load(cls, model_dir: str | Path, *, trust_remote_code: bool = False) -> "Tokenizer | None":
        """None if the directory has no tokenizer files. Raises `CorruptCheckpoint` if they can not be read."""
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
            raise CorruptCheckpoint(
                f"the tokenizer in {path} can not be read: {clipped(str(error), 400)}", field="model"
            ) from error
        return cls(fast)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens the model wants in front unless said otherwise."""
        return self._fast.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._fast.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def text_of(self, token_id: int) -> str:
        """One token by itself, special ones too."""
        return self._fast.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> list[int]:
        """Token ids of a conversation, up to where the model answers. transformers runs templates in a sandbox.

        options: variables for the template. Raises `InvalidRequest` when the checkpoint has no template, or the
        template refuses the messages.
        """
        if not self._fast.chat_template:
            raise InvalidRequest("this checkpoint has no chat template; send the prompt as text", field="messages")
        options = {"add_generation_prompt": True, **options}
        try:
            encoded = self._fast.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=True, **options
            )
        except Exception as error:  # noqa: BLE001  templates raise what their authors wrote
            raise InvalidRequest(f"the chat template refuses these messages: {error}", field="messages") from None
        return list(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)

    def stream(self) -> "TextStream":
        """A decoder for tokens that come one by one."""
        return TextStream(self)


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
        self._told = 0  # tokens whose text has been handed out

    def push(self, token_ids: Sequence[int]) -> str:
        """New text, which may be empty."""
        self._tokens += token_ids
        before, now = self._texts()
        if now.endswith("\N{REPLACEMENT CHARACTER}") or len(now) <= len(before):
            return ""  # in the middle of a character
        self._settled, self._told = self._told, len(self._tokens)
        return now[len(before) :]

    def finish(self) -> str:
        """The rest, be it half a character."""
        before, now = self._texts()
        self._settled = self._told = len(self._tokens)
        return now[len(before) :]

    def _texts(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._tokens[self._settled : self._told]), decode(self._tokens[self._settled :])


def encode_prompt(tokenizer: Tokenizer | None, text: str, model: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text prompt. Raises `InvalidRequest` when the model has no tokenizer."""
    if tokenizer is None:
        raise InvalidRequest(f"{model} has no tokenizer, so it takes prompts of token ids only", field="prompt")
    return tokenizer.encode(text, add_special_tokens)
