"""Fields of other servers' APIs that this one knows and does not serve: refused by name, or ignored for a reason.

docs/fields.md is written from this (deploy/fields.py), and a test holds it against what the other servers' documents
list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hamburger.server.bodies.refusals import Refused, but, if_any, if_on


def _without(fields: Mapping[str, Refused], *served: str) -> dict[str, Refused]:
    return {name: refused for name, refused in fields.items() if name not in served}


def _is_negative(value: Any) -> bool:
    return type(value) in (int, float) and value < 0


_ONE_MACHINE = "one server computes all of an answer"
_COMMON: dict[str, Refused] = {
    "store": if_on(),
    "service_tier": but("auto", "default"),
    "use_beam_search": if_on("ask for n answers"),
    "length_penalty": but(1, 1.0),
    "spaces_between_special_tokens": but(True),
    "logprob_token_ids": if_any("ask for logprobs"),
    "logits_processors": if_any(),
    "guided_whitespace_pattern": but(),
    "structural_tag": but(),
    "disable_any_whitespace": if_on("say it in structured_outputs"),
    "repetition_detection": if_any(),
    "vllm_xargs": if_any(),
    "watermarking": if_on(),
    "kv_transfer_params": if_any(_ONE_MACHINE),
    "ec_transfer_params": if_any(_ONE_MACHINE),
    **dict.fromkeys(
        ["groups", "max_group", "settle_window", "settle_growth", "settle_keep", "settle_limit", "target_tpot_ms",
         "kv_cache_dtype"],
        but(instead="it is a setting of the server"),
    ),
}  # fmt: skip
_SGLANG: dict[str, Refused] = {
    "stop_regex": if_any("use stop, or end the answer by a grammar (regex)"),
    "custom_logit_processor": if_any(),
    "lora_path": if_any("name what /v1/models lists"),
    "extra_key": if_any("use cache_salt"),
    "session_params": if_any("send the whole conversation"),
    "bootstrap_host": if_any(_ONE_MACHINE),
    "bootstrap_port": but(instead=_ONE_MACHINE),
    "bootstrap_room": but(instead=_ONE_MACHINE),
    "return_hidden_states": if_on(),
    "return_routed_experts": if_on(),
    "return_cached_tokens_details": if_on("usage.prompt_tokens_details has the sum"),
    "return_spec_tokens_details": if_on("use return_groups"),
    "watermark": if_any(),
}
_LLAMA_CPP: dict[str, Refused] = {
    "n_predict": but(-1, instead="use max_tokens"),
    "n_probs": but(0, instead="use logprobs"),
    "n_cmpl": but(1, instead="use n"),
    "n_indent": but(0),
    "min_keep": but(0),
    "repeat_penalty": but(1, 1.0, instead="use repetition_penalty"),
    "typical_p": but(1, 1.0),
    "mirostat": but(0),
    "dynatemp_range": but(0, 0.0),
    "dry_multiplier": but(0, 0.0),
    "xtc_probability": but(0, 0.0),
    "top_n_sigma": but(-1, -1.0),
    "adaptive_target": Refused(_is_negative),
    "t_max_predict_ms": but(0, -1, instead="use max_tokens"),
    "samplers": if_any(),
    "lora": if_any("name what /v1/models lists"),
    "post_sampling_probs": if_on("logprobs are the model's own"),
    "response_fields": if_any(),
    "return_tokens": if_on("use return_token_ids"),
    "reasoning_budget_tokens": but(-1, instead="use thinking_token_budget"),
    "reasoning_control": if_on(),
}
_LMDEPLOY: dict[str, Refused] = {
    "repetition_ngram_size": but(0),
    "migration_request": if_any(_ONE_MACHINE),
    "with_cache": if_on(_ONE_MACHINE),
    "preserve_cache": if_on(_ONE_MACHINE),
}
_BOTH = _COMMON | _SGLANG | _LLAMA_CPP | _LMDEPLOY

# What other endpoints of ours call otherwise, or have alone.
_OF_OTHER_ENDPOINTS: dict[str, Refused] = {
    "input": if_any("use messages, or responses"),
    "instructions": if_any("use a system message"),
    "system": if_any("use a system message"),
    "prompt": if_any("use messages, or completions"),
    "suffix": if_any(),
    "best_of": but(1, instead="use n"),
    "max_output_tokens": but(instead="use max_tokens"),
    "stop_sequences": if_any("use stop"),
    "text": but({}, {"format": {"type": "text"}}, instead="use response_format"),
    "previous_response_id": but(instead="send the whole conversation, or use responses"),
    "truncation": but("disabled", instead="use truncate_prompt_tokens"),
}
REFUSED_CHAT: dict[str, Refused] = (
    _BOTH
    | _OF_OTHER_ENDPOINTS
    | {
        "functions": if_any("use tools"),
        "function_call": but("none", "auto", instead="use tool_choice"),
        "echo": if_on(),
        "add_special_tokens": if_on("the chat template writes them"),
        "chat_template": but(instead="a template is code, and the server's is used (serve --chat-template)"),
        "documents": if_any("put them into the messages"),
        "modalities": but(["text"]),
        "audio": but(),
        "moderation": if_any(),
        "verbosity": but("medium"),
        "web_search_options": but(),
        "input_ids": if_any("use completions, whose prompt may be token ids"),
        "image_data": if_any(),
        "images_config": if_any(),
        "do_preprocess": but(True, instead="use completions"),
        "thinking": if_any("use chat_template_kwargs"),
        "reasoning": if_any("use chat_template_kwargs"),
        "thinking_budget_tokens": but(-1, instead="use thinking_token_budget"),
        "min_new_tokens": but(0, instead="use min_tokens"),
        "return_logprob": if_on("use logprobs"),
        "return_meta_info": if_on(),
        "return_prompt_text": if_on(),
        "return_prompt_token_ids": if_on("use return_token_ids"),
        "return_input_ids_in_sglext": if_on("use return_token_ids"),
        "return_output_ids_in_sglext": if_on("use return_token_ids"),
        "return_sampling_mask": if_on(),
        "sampling_logprobs_mode": but("selected"),
        "tool_prompt": but(""),
    }
)
# A chat's, which its other forms (responses, messages) would leave out, served there or not.
_ONLY_IN_A_CHAT: dict[str, Refused] = REFUSED_CHAT | {
    "use_beam_search": if_on(),
    "include_reasoning": but(True, instead="use chat completions"),
    "separate_reasoning": but(True, instead="use chat completions"),
    "return_tokens_as_token_ids": if_on("use chat completions"),
    "prediction": but(instead="use chat completions"),
    "prompt_logprobs": but(instead="use chat completions"),
    "return_groups": if_on("use chat completions"),
}
_IDS = if_on("use chat completions")
_ONE_ANSWER = but(1, instead="ask for one answer at a time, or use chat completions")
# What a chat may use instead is not there in its other forms.
_ONLY_IN_A_CHAT |= {
    "n": _ONE_ANSWER,
    "best_of": _ONE_ANSWER,
    "n_cmpl": _ONE_ANSWER,
    **dict.fromkeys(
        ["return_token_ids", "return_tokens", "return_prompt_token_ids", "return_input_ids_in_sglext",
         "return_output_ids_in_sglext", "return_spec_tokens_details"],
        _IDS,
    ),
}  # fmt: skip
_OWN_OF_RESPONSES = "input", "instructions", "max_output_tokens", "text", "previous_response_id"
REFUSED_RESPONSE: dict[str, Refused] = _without(_ONLY_IN_A_CHAT, "reasoning", "store", *_OWN_OF_RESPONSES) | {
    "system": if_any("use instructions"),
    "messages": if_any("use input"),
    "max_tokens": but(instead="use max_output_tokens"),
    "max_completion_tokens": but(instead="use max_output_tokens"),
    "response_format": but({"type": "text"}, instead="use text.format"),
    "reasoning_effort": but(instead="use reasoning.effort"),
    "logprobs": if_on("use top_logprobs"),
    "n_probs": but(0, instead="use top_logprobs"),
    "return_logprob": if_on("use top_logprobs"),
    "logprob_token_ids": if_any("use top_logprobs"),
    "n_predict": but(-1, instead="use max_output_tokens"),
    "t_max_predict_ms": but(0, -1, instead="use max_output_tokens"),
    "background_options": if_any(),
    "conversation": but(instead="use previous_response_id"),
    "prompt": but(instead="send instructions and input"),
    "max_tool_calls": but(instead="no tool is called by the server"),
    "truncation": but("disabled", instead="shorten the input"),
    "service_tier": but("auto", "default"),
    "moderation": if_any(),
    "context_management": if_any(),
}
_SHAPES = "use chat completions or responses"
# Of what makes a prompt, and of those who count its tokens.
REFUSED_COUNT: dict[str, Refused] = {
    "container": but(),
    "mcp_servers": if_any(),
    "context_management": but({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "inference_geo": but(),
    "output_format": if_any("use output_config.format"),
    "thread": but(instead="send the whole conversation"),
    "compaction": but(),
    "fallbacks": if_any(),
    "speed": but("standard"),
}
_OWN_OF_MESSAGES = "system", "stop_sequences"
REFUSED_MESSAGE: dict[str, Refused] = REFUSED_COUNT | _without(_ONLY_IN_A_CHAT, "thinking", *_OWN_OF_MESSAGES) | {
    "service_tier": but("auto", "standard_only"),
    "stop_regex": if_any("use stop_sequences"),
    "truncation": but("disabled", instead="shorten the conversation"),
    "thinking_budget_tokens": but(-1, instead="use thinking"),
    "reasoning_budget_tokens": but(-1, instead="use thinking"),
    "n_probs": but(0, instead=_SHAPES),
    "return_logprob": if_on(_SHAPES),
    "logprob_token_ids": if_any(_SHAPES),
    "min_new_tokens": but(0, instead=_SHAPES),
    "repeat_penalty": but(1, 1.0, instead=_SHAPES),
    "extra_key": if_any(_SHAPES),
    "instructions": if_any("use system"),
    "text": but({}, {"format": {"type": "text"}}, instead="use output_config.format"),
    "reasoning": if_any("use thinking"),
    "stop": if_any("use stop_sequences"),
    "max_completion_tokens": but(instead="use max_tokens"),
    "response_format": but({"type": "text"}, instead="use output_config.format"),
    "reasoning_effort": but(instead="use output_config.effort"),
    "enable_thinking": but(instead="use thinking"),
    "thinking_token_budget": but(-1, instead="use thinking"),
    "parallel_tool_calls": but(True, instead="use tool_choice.disable_parallel_tool_use"),
    "logprobs": if_on(_SHAPES),
    "top_logprobs": but(0, instead=_SHAPES),
    "priority": but(0, instead=_SHAPES),
    "min_p": but(0, 0.0, instead=_SHAPES),
    "min_tokens": but(0, instead=_SHAPES),
    "ignore_eos": if_on(_SHAPES),
    "include_stop_str_in_output": if_on(_SHAPES),
    "no_stop_trim": if_on(_SHAPES),
    "skip_special_tokens": but(True, instead=_SHAPES),
    "truncate_prompt_tokens": but(instead=_SHAPES),
    "truncation_side": but("left", instead=_SHAPES),
    "presence_penalty": but(0, 0.0, instead=_SHAPES),
    "frequency_penalty": but(0, 0.0, instead=_SHAPES),
    "repetition_penalty": but(1, 1.0, instead=_SHAPES),
    **dict.fromkeys(
        ["stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "guided_json",
         "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf", "grammar",
         "cache_salt", "chat_template_kwargs"],
        if_any(_SHAPES),
    ),
}  # fmt: skip
_CHAT = "use chat completions"
REFUSED_COMPLETION: dict[str, Refused] = (
    _BOTH
    | _without(_OF_OTHER_ENDPOINTS, "prompt", "best_of")
    | {
        "input": if_any("use prompt"),
        "instructions": if_any(_CHAT),
        "system": if_any(_CHAT),
        "messages": if_any(_CHAT),
        "tools": if_any(_CHAT),
        "tool_choice": but("none", "auto", instead=_CHAT),
        "top_logprobs": but(0, instead="use logprobs, which is a number here"),
        "reasoning_effort": but("none", instead=_CHAT),
        "chat_template_kwargs": if_any(_CHAT),
        "prompt_embeds": but(),
        "prediction": but(instead=_CHAT),
        "thinking_token_budget": but(-1, instead=_CHAT),
        "reasoning_budget_tokens": but(-1, instead=_CHAT),
        "continue_final_message": if_on("a prompt is always continued"),
        "images_config": if_any(),
    }
)
REFUSED_TOKENIZE: dict[str, Refused] = {
    name: REFUSED_CHAT[name] for name in ("chat_template", "documents", "functions", "input", "instructions", "system")
} | {"truncate_prompt_tokens": but(instead="all of the prompt is counted")}

_ONLY_WITH = "says how, where another field that is refused says that"
_IMAGES = "of images, video and audio, which messages cannot have here"
_HINT = "a hint for the cache or the scheduler, which need none"
_TOLD = "adds to what is told, not to the answer"
_NAMES = "names the request for logs; X-Request-Id does that here"
_PLACE = "places the request in a cluster of that server's own kind"
_REASONING = "says how reasoning is sent, which is apart from the text, as it comes (separate_reasoning)"
IGNORED: dict[str, str] = {
    **dict.fromkeys(
        ["adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
         "dynatemp_exponent", "mirostat_eta", "mirostat_tau", "repeat_last_n", "xtc_threshold", "custom_params",
         "reasoning_budget_message", "repetition_ngram_threshold", "routed_experts_prompt_start",
         "routed_experts_start_len", "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64"],
        _ONLY_WITH,
    ),
    **dict.fromkeys(
        ["media_io_kwargs", "mm_processor_kwargs", "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video",
         "video_config", "return_mm_kwargs"],
        _IMAGES,
    ),
    **dict.fromkeys(
        ["cache_prompt", "id_slot", "n_cache_reuse", "backend_sampling", "prompt_cache_key", "prompt_cache_options",
         "prompt_cache_retention", "session_id"],
        _HINT,
    ),
    **dict.fromkeys(["n_keep", "n_discard"], "a context is never shifted here: an answer ends with it"),
    **dict.fromkeys(
        ["timings_per_token", "return_progress", "verbose", "return_token_offsets", "stream_interval",
         "diagnostics"],
        _TOLD,
    ),
    "sse_ping_interval": "the server's setting sse_keep_alive_seconds says when a silent stream gets a comment",
    **dict.fromkeys(["request_id", "rid", "metadata", "safety_identifier", "custom_labels"], _NAMES),
    **dict.fromkeys(["data_parallel_rank", "disagg_prefill_dp_rank", "routed_dp_rank"], _PLACE),
    **dict.fromkeys(["stream_reasoning", "reasoning_format"], _REASONING),
    "task": "read by one model's own encoder only",
}  # fmt: skip
