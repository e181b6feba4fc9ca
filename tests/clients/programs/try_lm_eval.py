"""EleutherAI's lm-eval, with tasks of its own kinds on our lines of text."""

import json
import os
from pathlib import Path

from commands import command
from probing import KEY, MODEL, TOKENIZER, URL, expect, probe, run

LINES = [{"question": f"Which wood is number {n}?", "choices": ["oak", "ash"], "answer": n % 2} for n in range(6)]
Path("lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
HEAD = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {os.path.abspath("lines.jsonl")}}}}}
test_split: test
"""
TASKS = {
    "choose": "output_type: multiple_choice\ndoc_to_text: question\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    "metric_list: [{metric: acc}]\n",
    "say": "output_type: generate_until\ndoc_to_text: question\ndoc_to_target: 'oak'\n"
    "generation_kwargs: {until: ['zzz'], max_gen_toks: 12, do_sample: false}\nmetric_list: [{metric: exact_match}]\n",
    "surprise": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: question\n"
    "metric_list: [{metric: word_perplexity}]\n",
}
Path("tasks").mkdir(exist_ok=True)
for name, more in TASKS.items():
    (Path("tasks") / f"{name}.yaml").write_text(f"task: {name}\n{HEAD}{more}")


def measured(task: str, model: str, path: str, *more: str) -> str:
    settings = (
        f"model={MODEL},base_url={URL}/{path},tokenizer={TOKENIZER},tokenizer_backend=huggingface,max_retries=1,"
        "num_concurrent=2,max_length=1024,tokenized_requests=" + str(model == "local-completions")
    )
    said = command(
        "lm_eval", "run", "--model", model, "--model_args", settings, "--tasks", task, "--include_path", "tasks",
        "--output_path", "found", *more, OPENAI_API_KEY=KEY, HF_DATASETS_CACHE=os.path.abspath("datasets"),
    )  # fmt: skip
    expect(task in said and "Traceback" not in said, said[-300:])
    return "measured on 6 lines"


for task in TASKS:

    @probe(f"local-completions: {task}")
    def _(task=task):
        return measured(task, "local-completions", "completions")


@probe("local-chat-completions: say")
def _():
    return measured("say", "local-chat-completions", "chat/completions", "--apply_chat_template")


run()
