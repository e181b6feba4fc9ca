"""instructor, in all of its modes for servers of OpenAI's kind."""

from collections.abc import Iterable
from enum import Enum
from typing import Literal

import instructor
import openai
from instructor import Mode
from instructor.core import IncompleteOutputException, InstructorRetryException
from probing import KEY, MODEL, URL, expect, probe, run
from pydantic import BaseModel, Field


class Wood(Enum):
    OAK = "oak"
    ASH = "ash"


class Board(BaseModel):
    wood: Wood
    side: Literal["left", "right"]


class Table(BaseModel):
    top: Board
    legs: list[Wood] = Field(min_length=1, max_length=4)


class Order(BaseModel):
    """Without an enum, which the package itself refuses in what is partial."""

    wood: Literal["oak", "ash"]
    boards: Literal[1, 2]


client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
ASK = [{"role": "user", "content": "Which wood?"}]
ASKED = {"model": MODEL, "messages": ASK, "response_model": Table, "max_retries": 2, "max_tokens": 500}
IN_WORDS = (Mode.JSON, Mode.JSON_O1, Mode.MD_JSON)
HELD = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS)
"""Modes in which the server knows the schema. In the others the model is asked for it in words."""


@probe("TOOLS, a list of objects")
def _():
    found = instructor.from_openai(client, mode=Mode.TOOLS).chat.completions.create(
        **ASKED | {"response_model": list[Board], "max_tokens": 2000}
    )
    expect(all(isinstance(one, Board) for one in found), found)
    return "a list of Board"


def asked(mode: Mode):
    return instructor.from_openai(client, mode=mode)


for mode in HELD:

    @probe(mode.name)
    def _(mode=mode):
        return f"a {type(asked(mode).chat.completions.create(**ASKED)).__name__}"


for mode in IN_WORDS:

    @probe(mode.name)
    def _(mode=mode):
        """A model of random weights need not keep to what it is asked in words; instructor tells of it in its way."""
        try:
            found = asked(mode).chat.completions.create(**ASKED | {"max_retries": 1})
        except IncompleteOutputException:
            return "an answer, which a random model does not end"
        except InstructorRetryException as error:
            expect(error.last_completion is not None, error)
            return "an answer, which a random model's cannot fit"
        return f"a {type(found).__name__}"


@probe("PARALLEL_TOOLS")
def _():
    parallel = ASKED | {"response_model": Iterable[Board], "tool_choice": "auto"}
    try:
        list(asked(Mode.PARALLEL_TOOLS).chat.completions.create(**parallel) or ())
    except IncompleteOutputException:
        return "words, as a random model calls no tool unless it must"
    return "what the model chose to call"


for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):

    @probe(f"{mode.name}, partial")
    def _(mode=mode):
        seen = list(asked(mode).chat.completions.create_partial(**ASKED | {"response_model": Order}))
        expect(len(seen) > 1 and seen[-1].boards in (1, 2), seen)
        return "grows to a whole Order"


run()
