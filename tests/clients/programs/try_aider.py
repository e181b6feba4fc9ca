"""aider: a message about a file, in a repository of its own."""

import json
import os
import subprocess
from pathlib import Path

from commands import command
from probing import KEY, MODEL, URL, expect, probe, run

folder = Path("work")
folder.mkdir(exist_ok=True)
subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
for name, value in (("user.name", "joiner"), ("user.email", "joiner@example.org")):
    subprocess.run(["git", "config", name, value], cwd=folder, check=True)
(folder / "wood.py").write_text('WOOD = "oak"\n')
LENGTHS = {"max_input_tokens": 32768, "max_output_tokens": 64, "input_cost_per_token": 0, "output_cost_per_token": 0}
(folder / "lengths.json").write_text(json.dumps({f"openai/{MODEL}": LENGTHS | {"litellm_provider": "openai"}}))
(folder / "settings.yaml").write_text(
    f"- name: openai/{MODEL}\n  edit_format: whole\n  use_temperature: false\n  extra_params: {{max_tokens: 64}}\n"
)


def aider(message: str, *more: str) -> str:
    before = os.getcwd()
    os.chdir(folder)
    try:
        return command(
            "aider", "--model", f"openai/{MODEL}", "--openai-api-base", URL, "--openai-api-key", KEY, "--yes-always",
            "--no-auto-commits", "--no-check-update", "--no-show-release-notes", "--analytics-disable", "--no-pretty",
            "--no-suggest-shell-commands", "--no-gitignore", "--model-metadata-file", "lengths.json",
            "--model-settings-file", "settings.yaml", "--no-detect-urls", "--map-tokens", "1024", *more,
            "--message", message, "wood.py",
        )  # fmt: skip
    finally:
        os.chdir(before)


for name, more in (
    ("a change", ()),
    ("a change, not streamed", ("--no-stream",)),
    ("a question", ("--chat-mode", "ask")),
):

    @probe(name)
    def _(more=more):
        said = aider("Make it ash.", *more)
        expect("Tokens:" in said and "litellm" not in said, said[-300:])
        return "an answer, and its tokens"


@probe("prompt too long")
def _():
    said = aider("x" * 40_000)
    expect("token limit" in said.lower() or "ContextWindowExceeded" in said, said[-300:])
    return "aider's own words on token limits"


run()
