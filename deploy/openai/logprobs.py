"""Log-probabilities as each of the ways to ask for text tells them."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from ...proto.reply import TokenLogprobs, num_values
from ..front_end.json_pieces import Series
from ..front_end.tokenizer import Tokenizer
from .protocol import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob


class Spelling(NamedTuple):
    """How an answer spells tokens: by their texts, or by their ids where it is asked to or has no texts."""

    tokenizer: Tokenizer | None
    by_id: bool = False

    def text(self, token_id: int) -> str:
        if self.tokenizer is None or self.by_id:
            return f"token_id:{token_id}"
        return self.tokenizer.text_of(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        """The bytes of the token itself, which may be a part of a character, whatever its spelling."""
        return list(self.tokenizer.bytes_of(token_id) if self.tokenizer is not None else self.text(token_id).encode())


def of_prompt(rows: Sequence[TokenLogprobs] | None, spelling: Spelling) -> Series | None:
    """The rows of a prompt as `prompt_logprobs` shows them: nothing of the first token, then {id: {logprob, rank,
    text}} of each."""
    if rows is None:
        return None

    def entry(row: TokenLogprobs) -> dict[str, Any]:
        found = {
            str(token): {"logprob": logprob, "rank": n + 1, "decoded_token": spelling.text(token)}
            for n, (token, logprob) in enumerate(row.top)
        }
        own = {"logprob": row.logprob, "rank": row.rank or None, "decoded_token": spelling.text(row.token_id)}
        return {str(row.token_id): own} | found

    return Series(lambda: chain([None], map(entry, rows)), num_values=3 * num_values(rows))


def of_chat(rows: Sequence[TokenLogprobs], spelling: Spelling) -> ChatLogprobs:
    def about(token: int, logprob: float) -> dict[str, Any]:
        return {"token": spelling.text(token), "logprob": logprob, "bytes": spelling.bytes_of(token)}

    return ChatLogprobs(
        content=[
            ChatLogprob(
                **about(row.token_id, row.logprob), top_logprobs=[TopLogprob(**about(*other)) for other in row.top]
            )
            for row in rows
        ]
    )


def of_completion(
    prompt: Sequence[int] | None,
    about_prompt: Sequence[TokenLogprobs],
    rows: Sequence[TokenLogprobs],
    spelling: Spelling,
    offset: int,
) -> CompletionLogprobs:
    """Of an answer, and of the prompt before it if that is echoed; nothing is known of a prompt's first token. The
    token itself is always among the most probable ones, and the first of them.

    offset: characters of the answer that were told before
    """
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    as_text = spelling._replace(by_id=False)
    first = [TokenLogprobs(prompt[0], 0.0, ())] if prompt else []
    for n, row in enumerate(chain(first, about_prompt if prompt else (), rows)):
        text, is_known = spelling.text(row.token_id), n >= len(first)
        best = {text: row.logprob} | {spelling.text(token): logprob for token, logprob in row.top}
        best[text] = row.logprob  # whatever other token has the same text
        found.tokens.append(text)
        found.token_logprobs.append(row.logprob if is_known else None)
        found.top_logprobs.append(best if is_known else None)
        found.text_offset.append(offset)
        offset += len(as_text.text(row.token_id))
    return found
