"""The model that comes along: small, hybrid, and it speaks in words."""

import json
import re
from pathlib import Path

from intarsia import LLM, SamplingParams
from intarsia.deploy.demo import DEMO_MODEL_DIR, is_demo

ROOT = Path(__file__).parents[2]

PROMPTS = ["A program that", "The word hacker means", "In the early days of computing, programmers"]


def known_words() -> set[str]:
    """Words of this repository's own pages."""
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), ROOT / "README.md", ROOT / "LICENSE"]
    return set(re.findall(r"[a-z]+", " ".join(page.read_text() for page in pages).lower()))


def test_it_goes_on_in_recognisable_words(ray_cluster: None):
    with LLM("demo", kv_cache_memory="4MiB") as llm:
        assert llm.info.model == "demo" and [group.kind for group in llm.info.groups] == ["sliding-64", "full"]
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=160))
        chat = llm.chat([{"role": "user", "content": PROMPTS[0]}], SamplingParams(temperature=0, max_tokens=160))
        assert chat.text == outputs[0].text
    said = " ".join(output.text.rpartition(" ")[0] for output in outputs).lower()  # the last word may be cut off
    words = re.findall(r"[a-z]+", said)
    known = known_words()
    print(said)
    assert len(words) > 50
    assert sum(word in known for word in words) / len(words) > 0.6


def test_it_is_small_and_shaped_like_gemma_3():
    config = json.loads((DEMO_MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert config["max_position_embeddings"] == 32_768  # an agent's system prompt fits
    assert sum(path.stat().st_size for path in DEMO_MODEL_DIR.iterdir()) <= 3e6


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_demo("demo")
    (tmp_path / "demo").mkdir()
    assert not is_demo("demo")
