"""Every causal language model that the installed transformers knows, each as its config class has it, put to the proof.

    python -m intarsia.deploy.proof.sweep [FAMILY ..] [--ranks 1 2] [--seeds 3] [--first-seed 0] [--out FILE]
    python -m intarsia.deploy.proof.sweep --page FILE > docs/proven_families.md

Prints a line for each: what it is, how long that took, and why not. With `--out` verdicts are written there as JSON
lines, and families that are there already are left out: so a sweep can go on where it was ended.
"""

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...workers.known_families import is_known
from ...workers.models.families import WITH_ENCODER
from .prove import SEEDS, prove
from .verdict import Verdict

QWEN4_EXP: dict[str, Any] = {
    "eos_token_id": 248044, "ple_layer_ids": [2, 14], "output_gate_type": "sigmoid", "indexer_n_heads": 8,
    "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 64,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
COMPASS_KINDS = ["sliding_attention" if (n + 1) % 4 else "full_attention" for n in range(40)]
COMPASS_ROPE = {"rope_type": "default", "rope_theta": 50_000.0, "mrope_section": [24, 20, 20]}
STEP_KINDS = ["sliding_attention" if n % 4 else "full_attention" for n in range(45)]
LACKING: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 6, "attn_layer_indices": [2, 5]},
    "cohere_compass_text": {
        "num_key_value_heads": 8, "layer_types": COMPASS_KINDS,
        "rope_parameters": {"sliding_attention": COMPASS_ROPE, "full_attention": None},
    },
    "deepseek_ocr2": {"text_config": {
        "hidden_size": 1280, "intermediate_size": 6848, "num_hidden_layers": 12, "num_attention_heads": 10,
        "moe_intermediate_size": 896, "num_experts_per_tok": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 11,
    }},
    "dbrx": {"attn_config": {"rope_theta": 500_000.0, "kv_n_heads": 8, "clip_qkv": 8.0}, "n_heads": 48},
    "emu3": {"vocabulary_map": {"<image>": 151_851, "<|extra_200|>": 151_846}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "granite4_vision": {"deepstack_layer_map": [[-19, 9], [-13, 6], [-7, 3], [-1, 0]], "downsample_rate": "4/8"},
    "lfm2_moe": {"num_hidden_layers": 8, "layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": QWEN4_EXP},
    "qwen4_exp_text": QWEN4_EXP,
    **{
        name: {"text_config": {"head_dim": 128, "rope_parameters": {"rope_type": "default", **ropes}}}
        for names, ropes in (
            (("glm4v", "glm4v_moe", "glm_ocr"), {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}),
            (("ernie4_5_vl_moe",), {"mrope_section": [22, 22, 20]}),
            (("hunyuan_vl",), {"mrope_section": [16, 16, 16, 16]}),
            (("paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "qwen2_5_omni_thinker"), {"mrope_section": [16, 24, 24]}),
            (("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"), {"mrope_section": [24, 20, 20]}),
        )
        for name in names
    },
    "step3p7": {"text_config": {"sliding_window": 512, "layer_types": STEP_KINDS, "num_sliding_attention_heads": 96}},
}  # fmt: skip
"""What a config class leaves open though no model can be without it."""


def families() -> list[str]:
    """Those with a class for text alone, and multimodal ones whose text part has none."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    alone, wholes = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    others = [name for name in wholes if name not in alone and not _has_text_alone(CONFIG_MAPPING[name], alone)]
    return [*alone, *others]


def _has_text_alone(kind: Any, alone: Mapping[str, Any]) -> bool:
    """Of a model's config class. True where its text part may be of any kind, too."""
    text = kind.sub_configs.get("text_config")
    if not kind.sub_configs:
        return False
    return not getattr(text, "model_type", "") or text.model_type in alone


def sweep(names: Sequence[str], ranks: Sequence[int], seeds: Sequence[int]) -> Iterator[tuple[str, Verdict]]:
    from transformers import CONFIG_MAPPING

    for name in names:
        with tempfile.TemporaryDirectory(prefix="intarsia-sweep-") as folder:
            try:
                CONFIG_MAPPING[name](**LACKING.get(name, {})).save_pretrained(folder)
            except Exception as error:  # noqa: BLE001  transformers raises errors of any kind
                yield name, Verdict(name, False, tuple(ranks), 0.0, f"its config has no defaults: {error}")
                continue
            verdict = prove(Path(folder), ranks, seeds)
            if not verdict.is_right and len(ranks) > 1:  # what is wrong may be how it is cut
                alone = prove(Path(folder), ranks[:1], seeds)
                verdict = alone._replace(reason=verdict.reason) if alone.is_right else verdict
            yield name, verdict


def status_of(name: str, verdict: Verdict) -> str:
    """In a word or two, as `docs/families.md` has it."""
    if name in WITH_ENCODER and is_known((name,)):  # a proof leaves its encoder out; the tests do not
        return "tested"
    if verdict.is_right:
        known = "tested" if is_known((name, verdict.family)) else "proven on load"
        return known if len(verdict.ranks) > 1 or verdict.reason is None else f"{known}, on one rank"
    return "refused"


INTRODUCTION = """\
# Causal language models of transformers {version}

Each architecture that transformers has for causal language models, with the config that its class has: a small copy,
computed here and by transformers, on one rank and on two (`python -m intarsia.deploy.proof.sweep`). "Tested": the tests
put it through the whole gate, see [families](families.md). "Proven on load": it is served after a proof of some
seconds, of the config at hand. Whatever else differs, or cannot be built, is refused with the reason.
"""
LONGEST_REASON_CHARS = 200


def page(found: Sequence[tuple[str, Verdict]]) -> Iterator[str]:
    """As Markdown."""
    yield INTRODUCTION.format(version=version("transformers"))
    statuses = [status_of(name, verdict) for name, verdict in found]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in sorted(set(statuses), key=len))
    yield f"{len(found)} architectures: {counts}.\n"
    yield "| `model_type` | status | why not |\n|---|---|---|"
    for (name, verdict), status in zip(found, statuses, strict=True):
        reason = "" if status == "tested" else (verdict.reason or "").replace("|", "/").replace("\n", " ")
        short = reason if len(reason) <= LONGEST_REASON_CHARS else f"{reason[:LONGEST_REASON_CHARS]}.."
        yield f"| {name} | {status} | {short} |"


def read(file: Path) -> list[tuple[str, Verdict]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted((line.pop("name"), Verdict.from_json(json.dumps(line))) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first-seed", type=int, default=0, help="of the weights of the small copies")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, metavar="FILE", help="Print the page of what was found instead.")
    args = parser.parse_args()
    if args.page is not None:
        print("\n".join(page(read(args.page))))
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["TQDM_DISABLE"] = "1"
    known: set[str] = set()
    if args.out is not None and args.out.exists():
        known = {json.loads(line)["name"] for line in args.out.read_text().splitlines()}
    names = [name for name in args.families or families() if name not in known]
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for name, verdict in sweep(names, args.ranks, seeds):
        print(f"{name:28} {status_of(name, verdict):15} {verdict.took_s:5.1f} s  {verdict.reason or ''}", flush=True)
        if args.out is not None:
            with args.out.open("a") as out:
                out.write(json.dumps({"name": name, **json.loads(verdict.to_json())}) + "\n")


if __name__ == "__main__":
    main()
