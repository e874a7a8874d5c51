"""GGUF files with a trunk's numbers in their header, as llama.cpp's converter writes them; tests add the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf

from hamburger.model.config import TrunkConfig


@contextmanager
def gguf_file(path: Path, architecture: str, trunk: TrunkConfig) -> Iterator[gguf.GGUFWriter]:
    """The writer of a file, which is whole on disk at the end."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(trunk.max_position_embeddings)
    writer.add_embedding_length(trunk.hidden_size)
    writer.add_block_count(trunk.num_layers)
    writer.add_feed_forward_length(trunk.intermediate_size)
    writer.add_head_count(trunk.num_heads)
    writer.add_head_count_kv(trunk.num_kv_heads)
    writer.add_key_length(trunk.head_dim)
    writer.add_layer_norm_rms_eps(trunk.rms_norm_eps)
    writer.add_rope_freq_base(trunk.rope_theta)
    writer.add_eos_token_id(trunk.eos_token_ids[0])
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
