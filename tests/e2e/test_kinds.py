"""A folder that transformers wrote, served: its chat template, its end tokens, and transformers' words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peer import greedy, saved
from real_server import RealServer
from slow_cases import slow
from training_runs import words_tokenizer

TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}w3 {{ 'w7' if m['role'] == 'assistant' else 'w8' }} "
    "{{ m['content'] | trim }} w4 {% endfor %}{% if add_generation_prompt %}w3 w7{% endif %}"
)
PROMPT = [1, 3, 8, *range(20, 50), 4, 3, 7]


KINDS: dict[str, dict[str, Any]] = {
    "gemma": {
        "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 12, "sliding_window_pattern": 2,
        "tie_word_embeddings": False,
    },
    "glm4": {"model_type": "glm4", "head_dim": 32, "attention_bias": False},
    "olmoe": {
        "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "mlp_only_layers": [1],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gemma", ("--dtype", "float32")),
        ("qwen3_moe", ("--quantization", "int8")),
        slow("glm4", ("--dtype", "float32")),
        slow("olmoe", ("--dtype", "float32")),
        slow("olmoe", ("--quantization", "int8")),
        slow("gemma", ("--quantization", "int8")),
        slow("qwen3_moe", ("--dtype", "float32")),
    ],
)
def test_a_folder_answers_as_in_transformers(tmp_path: Path, kind: str, options: tuple[str, ...]) -> None:
    peer = saved(tmp_path, hidden_size=64, intermediate_size=96, **KINDS[kind])
    tokens = greedy(peer, PROMPT, 12)
    end = next(token for token in tokens[5:] if token not in tokens[:5])
    wanted = tokens[: tokens.index(end) + 1]
    words_tokenizer(96).save(str(tmp_path / "tokenizer.json"))
    described = {"chat_template": TEMPLATE, "bos_token": "w1", "eos_token": "w95"}  # no beginning of a word
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [95, end]}))
    question = " ".join(f"w{token}" for token in range(20, 50))
    with RealServer(str(tmp_path), *options) as server:
        answer = server.client.chat.completions.create(
            model=tmp_path.name, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=12
        )
        log = server.log()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    if options[0] == "--dtype":
        assert answer.choices[0].finish_reason == "stop"
        # Here the end is a word; it is counted, and no part of the text.
        assert (answer.choices[0].message.content or "").split() == [f"w{token}" for token in wanted[:-1]]
        assert answer.usage.completion_tokens == len(wanted)
    else:  # 8 bits may choose otherwise
        assert answer.usage.completion_tokens >= 1
        assert "weights as int8, kernels for" in log


def test_experts_with_settled_slots_and_drafts_from_text(tmp_path: Path) -> None:
    """On the kernels: drafts, which repeat what the answer repeats, change no word; old slots are given back."""
    saved(tmp_path, hidden_size=64, intermediate_size=96, **KINDS["qwen3_moe"])
    words_tokenizer(96).save(str(tmp_path / "tokenizer.json"))
    settle = ("--settle", "true", "--settle-window", "64", "--quantization", "int8", "--dtype", "float32")
    with RealServer(str(tmp_path), *settle) as server:

        def asked(confidence: float) -> tuple[str, dict[str, Any]]:
            answer = server.client.completions.create(
                model=tmp_path.name, prompt="w20 w21 w22", temperature=0, max_tokens=200,
                extra_body={"ignore_eos": True, "confidence": confidence},
            )  # fmt: skip
            assert answer.usage is not None
            return answer.choices[0].text, answer.usage.model_dump()

        plain, of_plain = asked(1.0)
        drafted, of_drafted = asked(0.0)
    assert drafted == plain
    assert of_drafted["completion_tokens"] == of_plain["completion_tokens"] == 200
    assert of_drafted["kv_slots"] == of_plain["kv_slots"] < 200
    assert of_drafted["macro_steps"] < of_plain["macro_steps"] == 200
