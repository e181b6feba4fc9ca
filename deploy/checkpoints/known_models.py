"""Models whose cache is known without their config: what `intarsia plan` and `intarsia replay` take by name.

The table holds facts only; here they become layer specs, one rank's share of them under tensor parallelism.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ...errors import InvalidSetting
from ...kvcache.reach import Chunked, Cross, Full, Reach, Sliding, State
from ...kvcache.spec import LayerSpec, StateTensor
from ...workers.checkpoint.layer_specs import FLOAT32_BYTES, KEEPS_NOTHING, Compression, RankShare

KIN = 0.75
"""How alike the first words of two names must be for one to be meant by the other: "gema", "gemma"."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One entry of the table."""

    id: str  # on the Hugging Face hub
    family: str
    max_position: int
    encoder_tokens: int  # of one image; 0 when no layer attends to an encoder
    entry: Mapping[str, Any]

    def layers(self, tensor_parallel_size: int = 1, item_bytes: int = 2) -> tuple[LayerSpec, ...]:
        """Raises `InvalidSetting` when heads do not divide among that many ranks."""
        share = RankShare(tensor_parallel_size, item_bytes, self.id)
        specs: list[LayerSpec] = []
        sharing = self.entry.get("sharing", {"layers": [], "source": {}})
        for index, kind in enumerate(self._kinds()):
            if kind in KEEPS_NOTHING:
                continue
            source = sharing["source"].get(kind) if index in sharing["layers"] else None
            if kind in self.entry["attention"]:
                specs += _attention(index, self.entry["attention"][kind], kind, share, source)
                specs += _compressed(index, self.entry["attention"][kind], share)
            if kind in self.entry.get("state", {}):
                specs.append(_state(index, self.entry["state"][kind], share))
        return tuple(specs)

    def _kinds(self) -> Iterator[str]:
        """The kind of each layer, in order. The table has runs: [times, [[kind, how many in a row], ...]]."""
        for times, pattern in self.entry["layers"]:
            for _ in range(times):
                for kind, count in pattern:
                    yield from [kind] * count


def known_models() -> tuple[KnownModel, ...]:
    return tuple(_table().values())


def known_model(name: str) -> KnownModel:
    """A model by its hub id, or by any part of it that fits only one: "gemma-3-27b", "jamba-1.5-mini".

    Raises `InvalidSetting`, with what is alike, when none or more than one fits.
    """
    table, wanted = _table(), name.lower().strip()
    for fits in (
        lambda id_: id_ == wanted,
        lambda id_: id_.split("/")[-1] == wanted,
        lambda id_: id_.split("/")[-1].startswith(wanted),
        lambda id_: wanted in id_,
    ):
        found = [model for id_, model in table.items() if wanted and fits(id_)]
        if len(found) == 1:
            return found[0]
        if found:
            raise InvalidSetting(
                f"{name!r} could be {', '.join(model.id for model in found[:6])}{' ...' if len(found) > 6 else ''}; "
                "say which one.",
                field="model",
            )
    alike = _alike(wanted)
    raise InvalidSetting(
        f"{name!r} is neither a directory, nor a config.json, nor a known model"
        + (f"; did you mean {' or '.join(alike)}?" if alike else "."),
        field="model",
    )


def _alike(wanted: str) -> list[str]:
    """Ids of models that may be meant: of the same maker, and called alike. wanted: in small letters."""
    maker, _, name = wanted.rpartition("/")
    word = _first_word(name)
    short = {}
    for id_, model in _table().items():
        its_maker, _, its_name = id_.rpartition("/")
        is_kin = difflib.SequenceMatcher(None, word, _first_word(its_name)).ratio() >= KIN
        if is_kin and (not maker or its_maker == maker):
            short[its_name] = model.id
    return [short[near] for near in difflib.get_close_matches(name, short, n=3, cutoff=0.4)]


def _first_word(name: str) -> str:
    """The letters that a model's name begins with: "gemma" of "gemma3-27b"."""
    found = re.match(r"[^\W\d_]+", name)
    return found[0] if found else name


@cache
def _table() -> dict[str, KnownModel]:
    entries = json.loads(files("intarsia.deploy.checkpoints").joinpath("known_models.json").read_text())
    return {
        entry["id"].lower(): KnownModel(
            entry["id"], entry["family"], entry["max_position"], entry.get("encoder_tokens", 0), entry
        )
        for entry in entries
    }


def _attention(index: int, facts: dict[str, Any], kind: str, share: RankShare, source: int | None) -> list[LayerSpec]:
    item = share.item_bytes
    beside = facts.get("indexer_elems_per_token", 0) * item
    if "cached_elems_per_token" in facts:  # one latent, or one vector that is key and value, on every rank
        heads, key_dim, value_dim = 1, facts["cached_elems_per_token"], 0
    else:
        heads = share.kv_heads(facts["num_kv_heads"])
        key_dim, value_dim = facts["head_dim"], facts["v_head_dim"]
    return [LayerSpec(index, _reach(kind, facts), heads, key_dim, value_dim, item, beside, shares=source)]


def _compressed(index: int, facts: dict[str, Any], share: RankShare) -> Sequence[LayerSpec]:
    """Beside a raw window: one entry for so many tokens, and what those give whose entry is not yet made. Beside
    latents: an index key for so many tokens."""
    if "pool" in facts:
        return Compression(facts["pool"], facts["pooled_elems_per_entry"]).layers(index, share.item_bytes)
    if "compress" not in facts:
        return ()
    entry = facts["cached_elems_per_token"]
    index_key = facts["compressed_elems_per_entry"] - entry
    overlaps = index_key > 0
    compression = Compression(facts["compress"], entry, index_key, overlaps=overlaps, is_beside_window=True)
    return compression.layers(index, share.item_bytes)


def _reach(kind: str, facts: dict[str, Any]) -> Reach:
    if kind == "cross_attention":
        return Cross()
    if "window" in facts:
        return Sliding(facts["window"])
    return Chunked(facts["chunk"]) if "chunk" in facts else Full()


def _state(index: int, facts: dict[str, Any], share: RankShare) -> LayerSpec:
    """States are split by heads, or by channels where there are none; some are whole on every rank."""
    conv, recurrent = facts["conv"], facts["recurrent"]
    if facts.get("whole"):
        share = RankShare(1, share.item_bytes, share.model)
    if "heads" in facts:
        share.part(facts["heads"], "state heads")
    tensors = []
    if conv is not None:
        channels = conv[0]
        if facts["kind"] == "mamba2":  # heads, and two projections that heads share in groups: whole where too few
            heads = recurrent[0] * recurrent[1]
            shared = channels - heads
            split = shared % (2 * recurrent[2] * share.ranks) == 0
            channels = share.part(heads, "channels") + (shared // share.ranks if split else shared)
        else:
            channels = share.part(channels, "channels of a convolution")
        tensors.append(StateTensor((channels, conv[1]), share.item_bytes))
    if recurrent is not None:
        tensors.append(StateTensor((share.part(recurrent[0], "state heads"), *recurrent[1:]), FLOAT32_BYTES))
    return LayerSpec(index, State(), state=tuple(tensors))
