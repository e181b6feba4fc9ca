"""A tiny hybrid checkpoint for the demo: Gemma 3 in miniature, with random weights and a small vocabulary of words.

Real code reads it (config.json, safetensors, tokenizer.json); only the answers make no sense.
"""

import re
from pathlib import Path

WORDS = """
The inlay of many woods makes one panel. Walnut and maple, cherry and oak, pear and ebony lie side by side, each cut to
its own line, and light runs over them as over one board. A craftsman draws the whole before the first cut: which wood
bends, which one splits, where the grain must turn. He keeps the small pieces, since the next panel will ask for them,
and gives back to the rack what no later line can need. So a model sees its text: some layers look at every word that
was ever said, some only through a window at the last few, and yet they share one table, one set of drawers, and
nothing is kept that nobody will read again. When the drawers are full the youngest work waits, and the oldest goes on.
"""

SLIDING, FULL = "sliding_attention", "full_attention"


def make_demo_checkpoint(folder: Path, seed: int = 7) -> Path:
    """Write the checkpoint. 12 layers: 10 see a window of 32 tokens, 2 see everything."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer()
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer.get_vocab()),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        layer_types=([SLIDING] * 5 + [FULL]) * 2,
        sliding_window=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.03)  # else the likeliest next word is the last one again
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


def _tokenizer():
    """One token per word or mark of `WORDS`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = sorted(set(re.findall(r"\w+|[^\w\s]", WORDS)))
    vocabulary = {word: index for index, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer
