"""What is asked of a worker at start-up, and what it answers. Free of torch, so that the controller can read it."""

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import InvalidSetting
from ..kvcache.spec import LayerSpec

DTYPES = ("auto", "float32", "bfloat16", "float16")


PACKED_PRODUCTS = "auto", "cpu", "cpu-int8", "triton", "reference", "expanded"
"""Weights in fewer bits are multiplied as they are stored, by C++ on a CPU, there with inputs rounded to 8 bits too, by
Triton on a GPU, or slowly by torch on any device; or they are expanded when they are loaded. "auto" is the device's of
these; on a CPU inputs are then rounded where the format means it so."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which checkpoint, in which precision, on how many workers."""

    model_dir: str
    tensor_parallel_size: int = 1
    dtype: str = "auto"  # "auto": the one the checkpoint was saved in
    attention_backend: str | None = None  # None: the first that covers the model's layers
    enforce_eager: bool = False  # run the module's own code: nothing fused, recorded or compiled
    torch_compile: bool = False  # let torch compile the module instead
    trust_remote_code: bool = False  # run Python files that come with the checkpoint
    same_bits: bool = False  # sums in one order, also where torch's own are faster
    packed_products: str = "auto"  # how weights in fewer bits are multiplied: one of PACKED_PRODUCTS
    cpu_threads: int | None = None  # that compute on a CPU; None: a share of the cores, fewer for short steps
    traces_endpoint: str | None = None  # where spans go, OTLP over HTTP; None: no traces
    tokenizer_dir: str | None = None  # None: the checkpoint's own
    chat_template: str | None = None  # a file; None: the tokenizer's own

    @property
    def text_dir(self) -> str:
        """Where the tokenizer is."""
        return self.tokenizer_dir or self.model_dir

    def __post_init__(self):
        if self.tensor_parallel_size < 1:
            raise InvalidSetting(
                f"tensor_parallel_size must be at least 1, got {self.tensor_parallel_size}",
                field="tensor_parallel_size",
            )
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise InvalidSetting(f"cpu_threads must be at least 1, got {self.cpu_threads}", field="cpu_threads")
        if self.enforce_eager and self.torch_compile:
            raise InvalidSetting(
                "enforce_eager runs the model as it is written, torch_compile does not: leave one of them out",
                field="torch_compile",
            )
        for other in ("enforce_eager", "torch_compile"):
            if self.same_bits and getattr(self, other):
                raise InvalidSetting(
                    f"same_bits needs kernels of our own, which {other} leaves out: leave one of them out",
                    field="same_bits",
                )
        if self.packed_products not in PACKED_PRODUCTS:
            raise InvalidSetting(
                f"packed_products must be one of {', '.join(PACKED_PRODUCTS)}; got {self.packed_products!r}",
                field="packed_products",
            )
        if self.dtype not in DTYPES:
            raise InvalidSetting(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}", field="dtype")


class ModelFacts(NamedTuple):
    """What a loaded model is, as one rank sees it."""

    architecture: str
    dtype: str
    device: str
    layers: tuple[LayerSpec, ...]  # this rank's share of the key and value heads
    weight_bytes: int  # on this rank
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: tuple[tuple[str, float], ...] = ()  # that generation_config.json asks for, by parameter
    image_token_id: int | None = None  # stands for an image in a prompt; None: the model takes none
    image_tokens: int = 0  # most that an image becomes, for layers that attend to it
    notes: tuple[str, ...] = ()  # what was read otherwise than the files say, for people


class RunnerLimits(NamedTuple):
    """How large the tables of a worker must be."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class WorkerStatus(NamedTuple):
    """How a worker is doing."""

    process_id: int
    host: str
    device: str
    memory_bytes: int  # of its process, on the host
    device_used_bytes: int | None  # by all processes; None: the device has no memory of its own
    device_bytes: int | None
    steps: int  # run since the start
    run_us: int  # that they took
    cpu_s: float  # that the process has computed


class Process(NamedTuple):
    """Where an actor runs. `started` tells it from a later one of the same number."""

    node_id: str
    host: str
    pid: int
    started: int


def check_length(max_model_len: int, positions: int) -> None:
    """Raises `InvalidSetting` for requests longer than a model has positions."""
    if max_model_len > positions:
        raise InvalidSetting(
            f"max_model_len of {max_model_len} tokens exceeds the {positions} positions that the model's config.json "
            "allows (max_position_embeddings). Lower max_model_len.",
            field="max_model_len",
            asked=max_model_len,
            limit=positions,
        )


def check_gpus(workers: int, gpus: float, where: str) -> None:
    """Raises `InvalidSetting` for more workers than there are GPUs. gpus: 0: they run on CPUs"""
    if 0 < gpus < workers:
        raise InvalidSetting(
            f"tensor_parallel_size {workers} needs {workers} GPUs; {where} has {gpus:g}. Lower it, or add nodes; on "
            "CPUs, which take minutes where GPUs take seconds, it runs in a Ray that was started with --num-gpus 0.",
            field="tensor_parallel_size",
            asked=workers,
            limit=gpus,
        )
