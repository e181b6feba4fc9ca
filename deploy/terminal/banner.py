"""What an engine says of itself when it has started."""

from rich.console import Console, Group, RenderableType
from rich.table import Table

from ...proto.status import EngineInfo


def banner(
    info: EngineInfo, http: str | None = None, grpc: str | None = None, console: str | None = None
) -> RenderableType:
    """The facts a person wants to see before the first request. Reads well at 80 columns."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    workers = f"{info.tensor_parallel_size} tensor-parallel workers" if info.tensor_parallel_size > 1 else "1 worker"
    facts.add_row("model", f"{info.model} ({info.architecture})")
    facts.add_row("weights", f"{human_bytes(info.weight_bytes)} per worker, {info.dtype} on {info.device}, {workers}")
    facts.add_row(
        "memory",
        f"{human_bytes(info.kv_cache_bytes)} per worker in {counted(info.num_buffers, 'buffer')}, "
        f"plan: {info.strategy}",
    )
    caching = "on" if info.enable_prefix_caching else "off"
    facts.add_row("pool", f"{counted(info.num_blocks, 'large page')}, prefix caching {caching}")
    facts.add_row(
        "holds",
        f"{info.capacity_tokens:,} tokens: {info.max_len_concurrency:.1f} requests of the maximum length of "
        f"{info.max_model_len:,} tokens",
    )
    facts.add_row("steps", f"up to {info.max_num_seqs:,} requests and {info.max_num_batched_tokens:,} tokens at a time")
    if info.image_token_id is not None:
        facts.add_row("images", f"up to {info.max_images_per_request} in a request, by token {info.image_token_id}")
    if info.sampling_defaults:
        wanted = ", ".join(f"{name} {value:g}" for name, value in info.sampling_defaults)
        facts.add_row("sampling", f"{wanted}, where a request does not say (generation_config.json)")
    for note in info.notes:
        facts.add_row("note", note)
    if http:
        facts.add_row("HTTP", f"{http}/v1 (OpenAI-compatible)")
    if grpc:
        facts.add_row("gRPC", grpc)
    if console:
        facts.add_row("console", console)
    return Group(facts, _groups(info))


def print_banner(
    info: EngineInfo, http: str | None = None, grpc: str | None = None, console: str | None = None
) -> None:
    Console(highlight=False).print(banner(info, http, grpc, console))


def human_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def human_seconds(seconds: float) -> str:
    """0.0123 -> "12 ms"."""
    if seconds >= 1:
        return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"


def _groups(info: EngineInfo) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (
        ("group", "right"),
        ("kind", "left"),
        ("layers", "left"),
        ("block", "right"),
        ("page", "right"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for index, group in enumerate(info.groups):
        table.add_row(
            str(index),
            group.kind,
            f"{len(group.layers)}: {_ranges(group.layers)}",
            counted(group.block_tokens, "token"),
            human_bytes(group.page_bytes),
        )
    return table


def _ranges(numbers: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
