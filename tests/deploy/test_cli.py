"""The command as a person or a script meets it: output, exit status, and never a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from intarsia import __version__
from intarsia.deploy.cli import app
from intarsia.proto.reply import Delta
from intarsia.tests.deploy.scripted import HANG

DELTAS = (Delta((7, 8), None, None, 2), Delta((9,), None, "length", 2))


def intarsia(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def assert_one_clean_line(result, *said: str) -> None:
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    for text in said:
        assert text in result.stderr


def test_token_ids_go_in_and_come_out(serve_script):
    engine, address = serve_script(*DELTAS)
    result = intarsia("generate", "--token-ids", "1,2,3", "--address", address, "--max-tokens", "3", "--seed", "4")
    assert (result.exit_code, result.stdout.split()) == (0, ["7", "8", "9"])
    assert result.stderr == "3 prompt tokens (2 cached), 3 generated\n"
    prompt, params, _ = engine.asked[0]
    assert (prompt, params.max_tokens, params.seed) == ([1, 2, 3], 3, 4)


def test_text_goes_in_and_comes_out(serve_script, byte_tokenizer):
    ids = tuple(byte_tokenizer.encode("¡olé!"))
    _, address = serve_script(Delta(ids, None, "length", 0), tokenizer=byte_tokenizer)
    assert intarsia("generate", "hi", "--address", address).stdout == "¡olé!\n"


def test_no_server_is_one_line_with_the_address():
    assert_one_clean_line(intarsia("generate", "hi", "--address", "127.0.0.1:1"), "127.0.0.1:1", "intarsia serve")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--temperature", "nan", "temperature"),
        ("--temperature", "-1", "temperature"),
        ("--top-p", "0", "top_p"),
        ("--max-tokens", "0", "max_tokens"),
        ("--seed", "-1", "seed"),
    ],
)
def test_impossible_sampling_flag_is_refused(flag, value, said):
    assert_one_clean_line(intarsia("generate", "hi", flag, value), said)


@pytest.mark.parametrize("ids", ["a,b", "1,-2", "4294967296"])
def test_unreadable_token_ids_are_refused(ids):
    assert_one_clean_line(intarsia("generate", "--token-ids", ids), "token-ids", ids)


def test_prompt_and_token_ids_exclude_each_other():
    assert_one_clean_line(intarsia("generate", "hi", "--token-ids", "1"), "either")
    assert_one_clean_line(intarsia("generate"), "either")


@pytest.mark.parametrize("arguments", [["generat", "hi"], ["serve"], ["generate", "hi", "--seed", "many"]])
def test_wrong_usage_exits_2(arguments):
    result = intarsia(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_missing_checkpoint_is_one_line(tmp_path: Path):
    assert_one_clean_line(intarsia("serve", str(tmp_path / "nowhere")), "nowhere")


def test_host_beyond_this_machine_is_refused_before_anything_starts(tmp_path: Path):
    """Not after a minute of loading: the checkpoint named here does not even exist."""
    assert_one_clean_line(intarsia("serve", str(tmp_path / "nowhere"), "--host", "0.0.0.0"), "loopback")


def test_interrupt_exits_130_quietly_and_stops_the_generation(serve_script):
    engine, address = serve_script(DELTAS[0], HANG)
    # As a terminal starts it: tests that run in the background let their processes ignore the interrupt.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = [sys.executable, "-c", f"{code}from intarsia.deploy.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "generate", "--token-ids", "1", "--address", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == "7"  # it streams: the first token is here, the last will never come
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert (process.returncode, stderr) == (130, "")
    assert engine.closed.wait(5)


def test_the_version_is_that_of_the_package():
    done = intarsia("--version")
    assert (done.exit_code, done.stdout) == (0, f"intarsia {__version__}\n")


def test_help_loads_nothing_heavy():
    heavy = ("torch", "ray", "grpc", "transformers", "tokenizers", "numpy")
    code = f"""
import sys
from intarsia.deploy.cli import app
try:
    app(["--help"])
except SystemExit:
    print("loaded", [name for name in {heavy} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "loaded []"
