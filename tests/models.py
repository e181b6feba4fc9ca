"""Tiny random checkpoints of real families, and the tokens transformers itself gives for them.

The oracle recomputes the whole sequence for every token (no cache, eager attention, float32). A checkpoint is good
only if its greedy output is not degenerate and changes when the window is ignored; `tests/workers/test_families.py`
proves that for each.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3TextConfig,
    PretrainedConfig,
)
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from intarsia.tests import newer_configs, tiny_configs
from intarsia.tests.tiny_configs import IMAGE, VOCAB
from intarsia.workers.models.text_part import around, has_own_class, text_part_class, with_initial_weights

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    make.__name__: make for make in (*tiny_configs.FAMILIES, *newer_configs.FAMILIES)
}

EACH_KIND = {
    "gemma3", "gpt_oss", "mistral", "llama4", "bamba", "jamba", "qwen3_next", "lfm2", "minimax", "mllama", "gemma3n",
    "deepseek_v3", "deepseek_v32",
}  # fmt: skip
"""Families with which each kind of layer is seen. `make test` puts them through all of the gate, the others through a
part of it, and `make test-all` all of them through all of it."""

WINDOWED = {
    "gemma3", "gemma2", "ministral", "gpt_oss", "cohere2", "olmo3", "exaone4", "llama4", "gemma3n", "gemma4_e",
    "gemma4", "mistral", "recurrent_gemma", "zaya", "qwen2", "mimo_v2_flash", "step3p7", "lfm3", "afmoe",
    "muse_glimmer", "deepseek_v4",
}  # fmt: skip
"""Families some of whose layers look back only so far."""

WITH_IMAGES = {"mllama"}
"""Families that are asked about images."""

WITH_CHOICE = {"deepseek_v32", "glm_moe_dsa", "minimax_m3", "mistral_large4", "deepseek_v4", "glm5_next"}
"""Families whose layers attend to tokens that an indexer chooses."""

WITH_SHARING = {"gemma3n", "gemma4_e"}
"""Families whose last layers read the keys and values of others."""

WITH_STATE = {
    "bamba", "granite4", "nemotron_h", "falcon_h1", "zamba2", "jamba", "minimax", "lfm2", "qwen3_next", "qwen3_5",
    "lfm2_moe", "qwen3_5_moe", "kimi_linear", "ling3", "recurrent_gemma", "mamba", "zaya", "lfm3",
    "olmo_hybrid", "glm5_next",
}  # fmt: skip
"""Families some of whose layers see the past through a state."""

STATES_ALONE = {"mamba"}
"""Families whose requests do not grow: once they run, nothing they need can be lacking."""

BLIND: dict[str, dict[str, Any]] = {name: {"sliding_window": 1 << 20} for name in WINDOWED}
"""What in a config makes a family see everything."""

BLIND["llama4"] = {"attention_chunk_size": 512}
BLIND["recurrent_gemma"] = {"attention_window_size": 1 << 20}
BLIND |= {name: {"index_topk": 512} for name in WITH_CHOICE - {"deepseek_v4", "minimax_m3"}}
BLIND["minimax_m3"] = {"index_topk_blocks": 512}

SEEDS = {
    "gemma3": 11, "gemma2": 32, "ministral": 23, "gpt_oss": 29, "llama": 24, "qwen3": 1, "smollm3": 1, "cohere2": 13,
    "olmo3": 2, "exaone4": 11, "llama4": 1, "bamba": 7, "granite4": 35, "nemotron_h": 6, "falcon_h1": 26,
    "zamba2": 3, "jamba": 1, "minimax": 13, "lfm2": 7, "qwen3_next": 2, "qwen3_5": 8,
    "gemma3n": 2, "gemma4_e": 1, "gemma4": 5, "deepseek_v3": 3, "deepseek_v32": 1, "glm_moe_dsa": 2,
    "mistral": 2, "ministral3": 5, "mllama": 4,
    "lfm2_moe": 1, "qwen3_5_moe": 1, "kimi_linear": 2, "ling3": 5, "recurrent_gemma": 19, "mamba": 3,
    "zaya": 14,
    "qwen2": 2, "qwen3_moe": 1, "mixtral": 4, "phi3": 5, "olmo2": 1, "glm4_moe": 2, "minimax_m2": 1,
    "minimax_m3": 6, "mimo_v2_flash": 3, "step3p7": 7, "lfm3": 3, "olmo_hybrid": 3, "afmoe": 6,
    "muse_glimmer": 3, "mistral4": 3, "mistral_large4": 2, "deepseek_v4": 7, "glm5_next": 3,
}  # fmt: skip
"""Seeds whose greedy tokens for `PROMPTS` lead the second best by 0.01 or more at every step, so that the last bits of
a sum decide nothing."""


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """`count` most probable tokens, each from a full recomputation of the sequence."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def is_greedy(model: Any, prompt: Sequence[int], output: Sequence[int], tie: float = 1e-3) -> bool:
    """Is each token of `output` the most probable one after those before it? For prompts that were not chosen by their
    margins: tokens whose logits differ by less than `tie` may trade places."""
    return not output or bool((behind_best(model, prompt, output)[0] <= tie).all())


@torch.inference_mode()
def behind_best(model: Any, prompt: Sequence[int], output: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token of `output`, after those before it: by how much its logit is less than the highest one, and the
    standard deviation of them all."""
    logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    return logits.amax(dim=1) - chosen, logits.std(dim=1)


SHIFTS = {"sinks": 0.5, "gate": 0.5, "temp": 3.0}
"""What is added to parameters that would be too weak around 0, by the ends of their names."""


BIASES_OF_ROUTERS = "correction_bias", "expert_bias", "balancing_biases"
"""Buffers by which routers choose experts, and do not weigh them. transformers leaves them at 0."""


def make_checkpoint(family: str, folder: Path, seed: int | None = None) -> Path:
    """Save a tiny random checkpoint, all its parameters random (sinks, biases and norms too)."""
    torch.manual_seed(SEEDS[family] if seed is None else seed)
    config = FAMILIES[family]()
    if family in WITH_IMAGES:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4).save_pretrained(folder)
    else:
        model = new_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # transformers leaves them at 0 or 1, which would hide mistakes
                shift = next((shift for end, shift in SHIFTS.items() if name.endswith(end)), 0.0)
                parameter.add_(torch.randn_like(parameter) * 0.1 + shift)
        for name, buffer in model.named_buffers():
            if name.endswith(BIASES_OF_ROUTERS):
                buffer.add_(torch.randn_like(buffer) * 0.1)
            if name.endswith("tid2eid"):  # which experts a token goes to, of each of the vocabulary
                count = model.config.get_text_config(decoder=True).n_routed_experts
                buffer.copy_(torch.rand(len(buffer), count).topk(buffer.shape[1]).indices)
        if getattr(model.config, "tie_word_embeddings", False):  # else the likeliest next token is the last again
            model.get_input_embeddings().weight.mul_(0.03)
            _last_norm(model).weight.add_(30.0)
    model.save_pretrained(folder)
    return folder


def new_model(text: PretrainedConfig) -> Any:
    """text: of a model, or of the text part of one that transformers has as a whole only: then around it the whole,
    whose other parts have no weights"""
    if has_own_class(text):
        return AutoModelForCausalLM.from_config(text, dtype=torch.float32)
    return with_initial_weights(around(text) or text)


@torch.inference_mode()
def log_probabilities(model: Any, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """[tokens of output, vocabulary]: what was probable where each token of `output` was chosen."""
    logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def _last_norm(model: Any) -> Any:
    """The norm before the head, by the names that families have for it."""
    names, inner = ("norm", "final_layernorm", "embedding_norm", "norm_f", "final_norm"), model.base_model
    return next(getattr(inner, name) for name in names if hasattr(inner, name))


class ImageOracle:
    """transformers' own model, about images.

    It lets tokens before the first image attend to all images; here they pass by, as in the authors' own code.
    """

    def __init__(self, path: Path, images: Sequence[bytes]):
        self._model = AutoModelForImageTextToText.from_pretrained(
            path, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self._inputs: dict[str, Any] = {}
        if images:
            pictures = [PIL.Image.open(io.BytesIO(image)).convert("RGB") for image in images]
            processor: Any = MllamaImageProcessorPil.from_pretrained(path)
            self._inputs = dict(processor(images=[pictures], return_tensors="pt"))
            self._tiles = self._inputs.pop("num_tiles")
        self._before = 0
        for module in self._model.modules():
            if type(module).__name__ == "MllamaTextCrossAttention":
                module.register_forward_hook(lambda _m, _i, out: (self._pass_by(out[0]), out[1]))

    def __call__(self, tokens: torch.Tensor, **settings: Any) -> Any:
        if not self._inputs:
            return self._model(tokens, **settings)
        ranges = [get_cross_attention_token_mask(tokens[0].tolist(), IMAGE)]
        mask = convert_sparse_cross_attention_mask_to_dense(ranges, self._tiles, 4, tokens.shape[1])
        self._before = ranges[0][0][0]
        return self._model(tokens, **self._inputs, cross_attention_mask=torch.from_numpy(mask), **settings)

    def _pass_by(self, out: torch.Tensor) -> torch.Tensor:
        out[:, : self._before] = 0
        return out


def picture(width: int, height: int, seed: int) -> bytes:
    """A PNG of random blots."""
    generator = torch.Generator().manual_seed(seed)
    blots = torch.randint(0, 256, (4, 6, 3), generator=generator, dtype=torch.uint8).numpy()
    file = io.BytesIO()
    PIL.Image.fromarray(blots).resize((width, height)).save(file, "PNG")
    return file.getvalue()


CHAT_TEMPLATE = r"""
{%- if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}
    {{- message.role }}: {{ message.content }}
    {%- for call in message.tool_calls or [] %} calls {{ call.function.name }} {{ call.function.arguments | tojson }}
    {%- endfor %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ voice | default('assistant') }}: {% endif %}"""


def make_talker(folder: Path, length_tokens: int = 512) -> Path:
    """A tiny random model whose tokens are the 256 bytes and an end, with its tokenizer. It would say anything."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: n for n, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8, max_position_embeddings=length_tokens,
        initializer_range=0.5, eos_token_id=tokenizer.token_to_id("<eos>"), bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def load_oracle(
    path: Path, images: Sequence[bytes] = (), dtype: torch.dtype = torch.float32, **config_changes: Any
) -> Any:
    """transformers' own model of a checkpoint, eager; `config_changes` make an ablation of it."""
    if path.name in WITH_IMAGES:
        return ImageOracle(path, images)
    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config(decoder=True)
    for name, value in config_changes.items():
        setattr(text, name, value)
    kind: Any = AutoModelForCausalLM if has_own_class(text) else text_part_class(config)
    how = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": dtype}
    return kind.from_pretrained(path, config=config, **how).eval()


def prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random token ids of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = prompts(seed=1, lengths=[5, 33, 47, 80])


def prompts_of(family: str) -> tuple[list[list[int]], list[list[bytes]]]:
    """Prompts of a family, and the images of each: none; one in front; one after some text; three, two of them
    together."""
    if family not in WITH_IMAGES:
        return PROMPTS, [[] for _ in PROMPTS]
    short, middle, long, longest = ([*prompt] for prompt in PROMPTS)
    middle[0] = long[3] = longest[2] = longest[3] = longest[40] = IMAGE
    pictures = [picture(20, 20, 1), picture(60, 25, 2), picture(30, 80, 3), picture(10, 30, 4), picture(50, 50, 5)]
    return [short, middle, long, longest], [[], pictures[:1], pictures[1:2], pictures[2:]]
