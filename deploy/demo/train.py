"""Trains the demo model: Gemma 3 in miniature, reading bytes.

    apt-get download jargon-text && dpkg -x jargon-text_*.deb jargon
    python deploy/demo/train.py jargon/usr/share/doc/jargon-text/jargon.txt.gz

writes the checkpoint to `model/` beside this file. The text is the Jargon File 4.4.7 (29 Dec 2003), which is in the
public domain; the package is `jargon-text` 4.4.7-4.1 of Debian. The model in the repository was made by this command
with its defaults (seed 7, two threads, torch 2.13, transformers 5.23), in an hour on two shared cores. It ends at 0.83
nats a byte on the text it has seen, and at 1.58 on what was held back: much of it is learnt by heart.
"""

import argparse
import gzip
import hashlib
import json
import math
import re
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

OUT = Path(__file__).parent / "model"

TEXT_SHA256 = "40dfb4b98191a670a09a183d5798d50f243d23fdbd1495dcc0aca2ce5895ba97"
"""The hash of the unpacked text."""

END = "<end>"  # between paragraphs that do not belong together

CHAT = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}"
"""The model has read no conversations: it goes on where the last message ends."""

WINDOW_TOKENS = 64

STAGES = ((0.8, 256, 24), (0.2, 1024, 6))
"""(share of the steps, tokens of a sequence, sequences in a batch): short ones are cheaper to learn words from."""

MATRIX_RATE, OTHER_RATE, WARM_UP_STEPS = 2e-2, 4e-3, 100
"""Learning rates: matrices by Muon (Jordan et al. 2024), the embedding and the scales by AdamW."""

HELD_BACK = 0.03  # of the text, to measure by

CRUDE = re.compile(
    r"\b(?:fuck|shit|bitch|piss|cunt|whore|rape|porn|sex|bondage|penis|vagina|condom|bastard|nazi|nigg|fag|dick|crap|"
    r"turd|fart|scrotum|masturbat|orgasm|suicid|hitler|slut|boob|breast|tits|damn)\w*",
    re.IGNORECASE,
)
"""Paragraphs with these words are left out of the demo."""

PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "-", "–": "-", "…": "...", "{": "", "}": ""})


def paragraphs(text: str) -> list[str]:
    """The prose of the file: no lists, tables, headlines and drawings."""
    _, found, body = text.partition("Hacker Slang and Hacker Culture\n\n   This")
    assert found, "this is not the Jargon File"
    kept = []
    for block in re.split(r"\n\s*\n", body):
        line = " ".join(block.translate(PLAIN).split())
        letters = sum(character.isalpha() or character == " " for character in line)
        is_prose = len(line) >= 60 and letters >= 0.9 * len(line) and line[-1] in ".!?\")'"
        if is_prose and line.isascii() and not CRUDE.search(line) and "http" not in line:
            kept.append(line)
    return kept


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and one for the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = CHAT
    return fast


def make_config(vocab_size: int, end: int) -> Gemma3TextConfig:
    """Five layers that look through a window, and one that looks at everything."""
    return Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        sliding_window=WINDOW_TOKENS,
        max_position_embeddings=32_768,  # far more than it was trained on: an agent's system prompt shall fit,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="jargon.txt.gz, as the package has it")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    raw = gzip.decompress(args.text.read_bytes())
    found = hashlib.sha256(raw).hexdigest()
    if found != TEXT_SHA256:
        print(f"this is another version of the text ({found}): the model will be another one")
    prose = paragraphs(raw.decode())
    tokenizer = make_tokenizer()
    end = tokenizer.vocab[END]
    tokens = torch.tensor([t for line in prose for t in (*tokenizer(line).input_ids, end)])
    held = int(len(tokens) * HELD_BACK)
    train, test = tokens[:-held], tokens[-held:]
    model = Gemma3ForCausalLM(make_config(len(tokenizer), end))
    model.config._attn_implementation = "sdpa"
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(prose)} paragraphs, {len(tokens)} tokens; {size} parameters")

    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(others, lr=OTHER_RATE, weight_decay=0.0, betas=(0.9, 0.98)),
    )
    rate = partial(_rate, steps=args.steps)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    draw = torch.Generator().manual_seed(args.seed)
    started, step = time.perf_counter(), 0
    for share, length, batch in STAGES:
        for _ in range(round(share * args.steps)):
            loss = _loss(model, _batch(train, length, batch, draw))
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            step += 1
            if step % 100 == 0:
                print(f"step {step}: {loss.item():.3f} nats a byte, {time.perf_counter() - started:.0f} s", flush=True)
    with torch.no_grad():
        rows = test[: len(test) // 1024 * 1024].view(-1, 1024)
        held_back = sum(_loss(model, row[None]).item() for row in rows) / len(rows)
    print(f"held back: {held_back:.3f} nats a byte = {held_back / math.log(2):.3f} bits")
    _save(model, tokenizer, args.out)


def _rate(step: int, steps: int) -> float:
    return min(1, (step + 1) / WARM_UP_STEPS) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)


def _batch(tokens: torch.Tensor, length: int, count: int, draw: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(tokens) - length, (count,), generator=draw)
    return torch.stack([tokens[start : start + length] for start in starts.tolist()])


def _loss(model: Gemma3ForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def _save(model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save it as any checkpoint is saved: bfloat16 on disk, to be computed in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_diff_dict() | {"architectures": ["Gemma3ForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
