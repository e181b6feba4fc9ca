"""How a picture is cut into tiles, and how many tokens it becomes. Free of torch, so that front ends can ask."""

from typing import Any

from ...errors import CorruptCheckpoint

PATCH_BESIDES = 1
"""A tile has one token more than patches: its class."""


def tile_processor(model_dir: str) -> Any:
    """transformers' image processor of a checkpoint, in its plain form, which needs Pillow only."""
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    try:
        return MllamaImageProcessorPil.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise CorruptCheckpoint(
            f"{model_dir} takes images, and its preprocessor_config.json cannot be read: {error}", field="model"
        ) from error


def count_tiles(processor: Any, width: int, height: int) -> int:
    """Tiles that a picture of so many pixels is cut into."""
    from transformers.models.mllama.image_processing_pil_mllama import get_optimal_tiled_canvas

    side = processor.size["height"]
    canvas = get_optimal_tiled_canvas(height, width, processor.max_image_tiles, side)
    return int(canvas[0] // side) * int(canvas[1] // side)


def tile_tokens(vision_config: Any) -> int:
    """Tokens that one tile becomes."""
    return (vision_config.image_size // vision_config.patch_size) ** 2 + PATCH_BESIDES
