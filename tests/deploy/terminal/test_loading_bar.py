import io
import re
import time

from rich.console import Console

from intarsia.deploy.terminal.loading_bar import loading_bar


def test_a_terminal_sees_how_much_is_loaded():
    screen = io.StringIO()
    with loading_bar(Console(file=screen, force_terminal=True, width=100)) as watch:
        assert watch is not None
        watch(0, 0)
        watch(250, 1000)
    assert "loading weights" in screen.getvalue()
    assert "25%" in screen.getvalue()


def test_a_file_is_spared_the_bar():
    file = io.StringIO()
    with loading_bar(Console(file=file)) as watch:
        assert watch is None
    assert file.getvalue() == ""


def test_a_terminal_sees_that_something_happens_before_weights_are_loaded_and_no_line_wraps():
    screen = io.StringIO()
    with loading_bar(Console(file=screen, force_terminal=True, width=80)) as watch:
        assert watch is not None
        watch(0, 0)
    assert "starting Ray and workers" in screen.getvalue() and "0:00:00" in screen.getvalue()
    assert "loading weights" not in screen.getvalue()


def test_a_terminal_sees_bytes_and_their_rate_and_keeps_one_line_of_them():
    screen = io.StringIO()
    with loading_bar(Console(file=screen, force_terminal=True, width=80), weight_bytes=4 * 10**9) as watch:
        assert watch is not None
        watch(0, 0)
        watch(1, 4)
        time.sleep(0.3)
        watch(4, 4)
    shown = screen.getvalue()
    assert "1.0/4.0 GB" in shown and "4.0/4.0 GB" in shown
    last = shown.splitlines()[-1]
    assert re.search(r"loaded 4\.00 GB of weights in 0\.\d s, [\d.]+ GB/s", last), last


def test_what_was_not_loaded_to_its_end_has_no_last_line():
    screen = io.StringIO()
    with loading_bar(Console(file=screen, force_terminal=True, width=80), weight_bytes=4 * 10**9) as watch:
        assert watch is not None
        watch(1, 4)
    assert "loaded" not in screen.getvalue()
