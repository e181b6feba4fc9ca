"""Run the clients against a server, and write what they answered to docs/clients.md.

    python -m intarsia.tests.clients [--only openai,litellm] [--jobs 1]

Exits with 1 if a probe fails. A client that cannot be installed here is told so on the page and is no failure.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from intarsia.tests.faults.served import KEYS, served

from . import report
from .environments import NotInstalled, Ready, ready
from .report import Answer, Result
from .table import CLIENTS, PROGRAMS, Client

MODEL = "talker"
RUN_S = 600.0
LAST_WORDS = 300
ANSWERS = "answers.jsonl"
"""In the client's home. Answers are not printed: a client may print in the same line, and the answer would be lost."""

Target = dict[str, str]
"""What a client is told of the server, as environment variables."""


@contextlib.contextmanager
def target(length_tokens: int) -> Iterator[Target]:
    """A server with the talker. length_tokens: of its longest text"""
    from intarsia.tests.models import make_talker

    with tempfile.TemporaryDirectory(prefix="intarsia-clients-", dir="/var/tmp") as folder:
        model = make_talker(Path(folder) / MODEL, length_tokens)
        with served(model=str(model), served_model_name=MODEL) as server:
            host, port = server.target.http
            yield {
                "BASE_URL": f"http://{host}:{port}/v1",
                "GRPC": server.target.grpc,
                "MODEL": MODEL,
                "API_KEY": KEYS["alice"],
                "TOKENIZER": str(model),
            }


def result_of(client: Client, target: Target) -> Result:
    try:
        environment = ready(client)
    except NotInstalled as error:
        return Result({}, (), str(error))
    answers, status, errors = _run(environment, target)
    note = "" if status == 0 and answers else f"ended with {status}: {errors.strip()[-LAST_WORDS:]}"
    return Result(environment.versions, answers, note)


def _run(environment: Ready, target: Target) -> tuple[tuple[Answer, ...], int, str]:
    """What its probes answered, its status, and its errors. It finds no settings but ours and leaves nothing."""
    with tempfile.TemporaryDirectory(prefix="intarsia-client-") as home:
        answers = Path(home) / ANSWERS
        answers.touch()
        process = subprocess.Popen(
            environment.command, cwd=home, env=_variables(environment, target, home), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _, errors = process.communicate()
            errors = f"not done after {RUN_S:g} s. {errors}"
        found = tuple(Answer(**json.loads(line)) for line in answers.read_text("utf-8").split("\n") if line)
    return found, process.returncode, errors


def _variables(environment: Ready, target: Target, home: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("LANG", "TRACE") if name in os.environ}
    path = f"{environment.folder / 'bin'}:{os.environ['PATH']}"
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "OTEL_SDK_DISABLED": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    own = {"HOME": home, "TMPDIR": home, "PATH": path, "PYTHONPATH": str(PROGRAMS), "ANSWERS": f"{home}/{ANSWERS}"}
    return kept | own | quiet | target


def chosen(names: str) -> list[Client]:
    """The clients of these names, by commas; all for none. Raises `SystemExit` for a name that is not known."""
    known = {client.name: client for client in CLIENTS}
    wanted = [name for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"no client {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in wanted] or list(CLIENTS)


def run(clients: Sequence[Client], jobs: int, target: Target) -> bool:
    """Whether all was fine, or could not be installed."""
    fine = True
    with ThreadPoolExecutor(jobs) as pool:
        for client, result in zip(clients, pool.map(lambda client: result_of(client, target), clients), strict=True):
            report.save(client, result)
            fine = fine and (result.is_fine or not result.versions)
            _show(client, result)
    return fine


def _show(client: Client, result: Result) -> None:
    for answer in result.answers:
        print(f"{client.name}: {answer.probe}: {'holds' if answer.ok else 'FAILS'}: {answer.answered}")
    if result.note:
        print(f"{client.name}: {result.note}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAMES", help="by commas  [default: all]")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="clients at a time  [default: 1]")
    parser.add_argument("--hold", action="store_true", help="only serve, print the variables, until Ctrl-C")
    parser.add_argument("--target", default="", metavar="JSON", help="variables that --hold printed")
    args = parser.parse_args()
    clients, told, fine = chosen(args.only), json.loads(args.target) if args.target else None, True
    for length in sorted({client.length_tokens for client in clients}):
        with contextlib.nullcontext(told) if told else target(length) as server:
            if args.hold:
                print(json.dumps(server), flush=True)
                with contextlib.suppress(KeyboardInterrupt):
                    signal.pause()
                return
            fine = run([each for each in clients if each.length_tokens == length], args.jobs, server) and fine
    report.write()
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
