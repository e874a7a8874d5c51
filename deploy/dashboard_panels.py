"""What the dashboard shows: its rows, their panels, and the PromQL of each. dashboard.py lays them out.

panel.py says what {S} and [R] are in the queries.
"""

from __future__ import annotations

from panel import Panel, by_adapter, by_model, mean, quantiles, stat

# For the same text a server with one token a slot computes the prompt's slots and one slot for each token.
SLOTS = (
    "(sum(increase(hamburger_kv_slots_total{S}[$__range])) - sum(increase(hamburger_dropped_slots_total{S}[$__range])))"
)
TOKENS = (
    'sum(increase(hamburger_kv_slots_total{S, kind="prompt"}[$__range]))'
    " + sum(increase(hamburger_generation_tokens_total{S}[$__range]))"
)
PROMPT_SLOTS = 'sum(rate(hamburger_kv_slots_total{S, kind="prompt"}[R]))'
GENERATED_SLOTS = 'sum(rate(hamburger_kv_slots_total{S, kind="generated"}[R]))'
DROPPED_SLOTS = "sum(rate(hamburger_dropped_slots_total{S}[R]))"
GENERATED_TOKENS = "sum(rate(hamburger_generation_tokens_total{S}[R]))"
ACCEPTED = (
    "sum by ({label}) (rate(hamburger_accepted_tokens_total{{S}}[R]))"
    " / sum by ({label}) (rate(hamburger_drafted_tokens_total{{S}}[R]))"
)
SERVER_ERRORS = 'sum(rate(hamburger_request_failure_total{S, code=~"5.."}[R]))'
COMPLETED = "sum(rate(hamburger_request_completed_total{S}[R]))"
RUNNING, WAITING = "sum(hamburger_num_requests_running{S})", "sum(hamburger_num_requests_waiting{S})"

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What groups buy",
        (
            stat(
                "Tokens per KV entry",
                "Generated tokens for one KV slot, over the last minute, of all chosen models. With one token "
                "a slot it is 1, and so with verified groups unless slots settle: it says nothing of speed.",
                f"{GENERATED_TOKENS} / sum(rate(hamburger_generation_tokens_total{{S}}[R])"
                " / (hamburger_tokens_per_kv_ratio{S} > 0)) > 0",
            ),
            stat(
                "Tokens/s",
                "Generated over the last ten seconds, all requests together.",
                "sum(hamburger_generation_tokens_per_second{S})",
            ),
            stat(
                "KV slots saved",
                "Share of the slots of a server with one token a slot that were not needed, in the time shown.",
                f"1 - {SLOTS} / ({TOKENS})",
                "percentunit",
            ),
            stat("Running", "Requests that hold KV slots.", RUNNING),
            stat("Waiting", "Requests in the queue, preempted ones included.", WAITING),
            stat(
                "KV pool in use",
                "The fullest pool of the chosen models and servers.",
                "max(hamburger_kv_cache_usage_perc{S})",
                "percentunit",
            ),
            Panel(
                "Tokens per KV entry",
                "1 means that every token has its slot: groups are off or verified, and nothing settles.",
                ((f"{GENERATED_TOKENS} / ({GENERATED_SLOTS} - {DROPPED_SLOTS})", "tokens per KV"),),
            ),
            Panel(
                "Group sizes",
                "How many groups had how many tokens.",
                (("sum by (le) (increase(hamburger_group_size_bucket{S}[R]))", "{{le}}"),),
                kind="heatmap",
            ),
            Panel(
                "Confidence in force",
                "What a request gets that names none (the lowest server's), and the mean of what finished ones had.",
                (
                    ("min(hamburger_confidence_in_force{S})", "in force"),
                    (mean("hamburger_request_confidence"), "of finished requests"),
                ),
            ),
        ),
    ),
    (
        "Drafts of verified groups",
        (
            Panel(
                "Tokens per macro-step",
                "Tokens that a sequence got of one pass of the trunk: 1 without drafts, and without composed groups.",
                (
                    (f"{GENERATED_TOKENS} / sum(rate(hamburger_group_size_count{{S}}[R]))", "tokens per macro-step"),
                    ("min(hamburger_tokens_per_macro_step{S} > 0)", "lowest model, over the last minute"),
                ),
            ),
            Panel(
                "Accepted drafts, by position",
                "Share of what was drafted at each place behind a sequence's newest token. It falls along a sequence: "
                "a draft counts only where all before it do.",
                ((ACCEPTED.format(label="position"), "{{position}}"),),
                "percentunit",
            ),
            Panel(
                "Accepted drafts, by drafter",
                "Share of what each drafted: the micro decoder, lookup in prompt and answer, predictions of requests.",
                ((ACCEPTED.format(label="drafter"), "{{drafter}}"),),
                "percentunit",
            ),
            Panel(
                "Drafts a second",
                "Tokens that were checked. Many sequences at once leave few that pay.",
                (("sum by (drafter) (rate(hamburger_drafted_tokens_total{S}[R]))", "{{drafter}}"),),
                stacked=True,
            ),
        ),
    ),
    (
        "Speed",
        (
            Panel(
                "Tokens/s",
                "Generated tokens, and tokens of prompts that were read.",
                ((GENERATED_TOKENS, "generated"), ("sum(rate(hamburger_prompt_tokens_total{S}[R]))", "prompt")),
            ),
            quantiles(
                "Time to first token",
                "From a request's arrival, queueing included.",
                "hamburger_time_to_first_token_seconds",
            ),
            quantiles(
                "Time per output token",
                "After the first: the gap before a group, shared among its tokens.",
                "hamburger_inter_token_latency_seconds",
            ),
            quantiles("Whole requests", "Arrival to end.", "hamburger_e2e_request_latency_seconds"),
            quantiles("Engine step", "One macro-step of the whole batch.", "hamburger_macro_step_seconds"),
            quantiles(
                "Event loop lag",
                "How late the server woke a task: what holds it up holds up all streams.",
                "hamburger_event_loop_lag_seconds",
            ),
            Panel(
                "Where a request's time goes",
                "Means: in the queue, filling its prompt, generating.",
                (
                    (mean("hamburger_request_queue_time_seconds"), "queue"),
                    (mean("hamburger_request_prefill_time_seconds"), "prefill"),
                    (mean("hamburger_request_decode_time_seconds"), "decode"),
                ),
                "s",
                stacked=True,
            ),
        ),
    ),
    (
        "Models side by side",
        (
            by_model(
                "Tokens per KV entry, each model",
                "One token a slot is 1. What lies above it is what composed groups or settled slots buy.",
                "sum by (model_name) (rate(hamburger_generation_tokens_total{S}[R]))"
                ' / (sum by (model_name) (rate(hamburger_kv_slots_total{S, kind="generated"}[R]))'
                " - sum by (model_name) (rate(hamburger_dropped_slots_total{S}[R])))",
            ),
            by_model(
                "Tokens/s, each model",
                "Generated tokens. Compare it beside the running requests: models that work at once share the machine.",
                "sum by (model_name) (rate(hamburger_generation_tokens_total{S}[R]))",
            ),
            by_model(
                "Running requests, each model",
                "Requests that hold KV slots.",
                "sum by (model_name) (hamburger_num_requests_running{S})",
            ),
            by_model(
                "Time to first token, each model",
                "The 95th percentile, queueing included.",
                "histogram_quantile(0.95,"
                " sum by (le, model_name) (rate(hamburger_time_to_first_token_seconds_bucket{S}[R])))",
                "s",
            ),
            by_model(
                "Time per output token, each model",
                "The 95th percentile: the gap before a group, shared among its tokens.",
                "histogram_quantile(0.95,"
                " sum by (le, model_name) (rate(hamburger_inter_token_latency_seconds_bucket{S}[R])))",
                "s",
            ),
            by_model(
                "Errors, each model",
                "Answers a second with an error. One without a name: of requests that named no model of several.",
                "sum by (model_name) (rate(hamburger_request_failure_total{S}[R]))",
            ),
        ),
    ),
    (
        "KV pool",
        (
            Panel(
                "KV slots computed a second",
                "Beside what a server with one token a slot would have computed for the same text.",
                (
                    (PROMPT_SLOTS, "prompt"),
                    (GENERATED_SLOTS, "generated"),
                    (f"{PROMPT_SLOTS} + {GENERATED_TOKENS}", "both, with one token a slot"),
                ),
            ),
            Panel(
                "Settled slots",
                "Old tokens of answers that were looked at, a second, and the slots that they gave back.",
                (
                    ("sum(rate(hamburger_settled_tokens_total{S}[R]))", "tokens"),
                    (DROPPED_SLOTS, "slots given back"),
                ),
            ),
            Panel(
                "Pool in use",
                "1 is full: then sequences are preempted and computed again later.",
                (("hamburger_kv_cache_usage_perc{S}", "{{instance}} {{engine}} {{model_name}}"),),
                "percentunit",
            ),
            Panel(
                "Preemptions",
                "Sequences a second that gave their blocks up.",
                (("sum(rate(hamburger_num_preemptions_total{S}[R]))", "preempted"),),
            ),
            Panel(
                "Prefix cache hits",
                "Share of the looked-up slots that were there already.",
                (
                    (
                        "sum(rate(hamburger_prefix_cache_hits_total{S}[R]))"
                        " / sum(rate(hamburger_prefix_cache_queries_total{S}[R]))",
                        "hits",
                    ),
                ),
                "percentunit",
            ),
            quantiles(
                "Work in one step",
                "Prompt slots computed and tokens generated.",
                "hamburger_iteration_tokens_total",
                "short",
            ),
            Panel(
                "Length of requests",
                "Means of finished ones, in tokens.",
                (
                    (mean("hamburger_request_prompt_tokens"), "prompt"),
                    (mean("hamburger_request_generation_tokens"), "generated"),
                ),
            ),
        ),
    ),
    (
        "Requests",
        (
            Panel(
                "Running and waiting",
                "Waiting requests have no KV slots yet, or gave them up.",
                ((RUNNING, "running"), (WAITING, "waiting")),
            ),
            quantiles("Queue time", "Arrival to first slots.", "hamburger_request_queue_time_seconds"),
            Panel(
                "Finished",
                "Answers a second by what ended them: a request for several has as many.",
                (("sum by (finished_reason) (rate(hamburger_request_success_total{S}[R]))", "{{finished_reason}}"),),
                stacked=True,
            ),
            Panel(
                "Errors",
                "Answers a second with an error, by status and reason. 429: the queue is full, or a key is at its "
                "limit; 503: waited too long, or stopping.",
                (("sum by (code, reason) (rate(hamburger_request_failure_total{S}[R]))", "{{code}} {{reason}}"),),
                stacked=True,
            ),
            Panel(
                "Share of server errors",
                "Of the requests, each counted once however many answers it wants: what ErrorRatio looks at.",
                ((f"{SERVER_ERRORS} / ({SERVER_ERRORS} + {COMPLETED})", "5xx"),),
                "percentunit",
            ),
            Panel(
                "Seats and queue in use",
                "Shares of the most that may run and wait. A queue at 1 turns requests away with 429.",
                (
                    (f"{RUNNING} / sum(hamburger_max_requests_running{{S}})", "running"),
                    (f"{WAITING} / sum(hamburger_max_requests_waiting{{S}})", "waiting"),
                ),
                "percentunit",
            ),
            Panel("Servers that answer", "1: Prometheus reaches it.", (('up{job="hamburger"}', "{{instance}}"),)),
            Panel(
                "Resident memory",
                "Of each process, mapped files included.",
                (("hamburger_resident_memory_bytes{S}", "{{instance}} {{engine}} {{model_name}} {{process}}"),),
                "bytes",
                stacked=True,
            ),
            Panel(
                "Engine up for",
                "It falls to 0 where an engine, or the whole server, started again.",
                (("time() - hamburger_engine_start_time_seconds{S}", "{{instance}} {{engine}} {{model_name}}"),),
                "s",
            ),
            Panel(
                "Sequences decoded at once",
                "Mean number in a step.",
                (
                    (
                        "sum(rate(hamburger_macro_steps_total{S}[R]))"
                        " / sum(rate(hamburger_macro_step_seconds_count{S}[R]))",
                        "sequences",
                    ),
                ),
            ),
        ),
    ),
    (
        "LoRA adapters",
        (
            by_adapter(
                "Tokens by adapter",
                "Of prompts that were read and of ended answers, a second.",
                "rate(hamburger_adapter_tokens_total{S}[R])",
            ),
            by_adapter("Ended requests by adapter", "A second.", "rate(hamburger_adapter_requests_total{S}[R])"),
            by_adapter("Open requests by adapter", "They run or wait.", "hamburger_adapter_requests_open{S}"),
        ),
    ),
)
