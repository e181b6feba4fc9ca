"""Both clients have one source. After a change: python deploy/client/unasync.py"""

from intarsia.deploy.client.unasync import HEADER, MADE, SOURCE, without_async


def test_the_waiting_client_is_made_of_the_other_one():
    assert MADE.read_text() == without_async(SOURCE.read_text())


def test_what_is_asynchronous_is_written_without():
    source = "async def each(self) -> AsyncGenerator[list[Event], None]:\n    async for one in await self.all():\n"
    made = "def each(self) -> Generator[list[Event], None, None]:\n    for one in self.all():\n"
    assert without_async(source) == HEADER + made
    assert "async" not in MADE.read_text().removeprefix(HEADER)
