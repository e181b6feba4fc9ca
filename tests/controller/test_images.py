import pytest

from intarsia.controller.images import lay_out
from intarsia.proto.request import Image
from intarsia.proto.step import EncoderInput, View

IMG = 99


@pytest.mark.parametrize(
    ("prompt", "tokens", "views", "starts", "total"),
    [
        ([IMG, 1, 2], [7], [(0, 0, 7)], [0], 7),
        ([1, 2, IMG, 3], [7], [(2, 0, 7)], [0], 7),
        ([IMG, 1, IMG, 2], [7, 4], [(0, 0, 7), (2, 2, 4)], [0, 8], 12),  # the second begins at a block of 4
        ([IMG, IMG, 1], [7, 4], [(0, 0, 7), (1, 0, 11)], [0, 7], 11),  # side by side: seen together
        ([1, IMG, 2, IMG, IMG, IMG, 3], [3, 1, 1, 1], [(1, 0, 3), (3, 1, 1), (4, 1, 2), (5, 1, 3)], [0, 4, 5, 6], 7),
    ],
)
def test_text_sees_the_latest_images_before_it_in_blocks_of_their_own(prompt, tokens, views, starts, total):
    images = [Image(b"%d" % n, count) for n, count in enumerate(tokens)]
    gallery = lay_out(prompt, IMG, images, block_tokens=4)
    assert gallery.views == tuple(View(*view) for view in views)
    assert gallery.inputs == tuple(EncoderInput(start, b"%d" % n) for n, start in enumerate(starts))
    assert gallery.encoder.tokens == total


def test_content_tells_images_apart_and_their_arrangement_but_not_the_text():
    def content(prompt: list[int], *data: bytes) -> bytes:
        return lay_out(prompt, IMG, [Image(one, 3) for one in data], 4).encoder.content

    assert content([IMG, 1, 2], b"a") == content([5, IMG, 7, 8], b"a")
    assert content([IMG], b"a") != content([IMG], b"b")
    assert content([IMG, IMG], b"a", b"b") != content([IMG, IMG], b"b", b"a")
    assert content([IMG, IMG], b"a", b"b") != content([IMG, 1, IMG], b"a", b"b")
