"""What gpu.py measures, in the order of importance. It names contestants; contestants.py knows what they are."""

from __future__ import annotations

from dataclasses import dataclass

OURS, FUSED, PLAIN, PEER = "hamburger", "hamburger fused", "base", "transformers"
OURS_INT8, PLAIN_INT8 = "hamburger int8", "base int8"
VERIFIED, UNDRAFTED = "hamburger verified", "verified without drafts"
WIDE = "hamburger of 4"  # a process: its model's max_group is above the groups that it makes
WIDE_GROUPS = {"hamburger 1 of 4": 1, "hamburger 2 of 4": 2, "hamburger 4 of 4": 4}
FORMS_STAGE, WIDE_STAGE = "forms of the decode step", "groups below max_group"
VERIFIED_STAGE = "verified groups"
LEAST_OUTPUT = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of prompts and answers, numbers of streams and contexts, each in the order in which they are measured.

    wide_streams: of the second part with groups below max_group. verified_streams: of verified groups. rows,
    confidences: of the forms of the decode step.
    """

    prompt: int
    output: int
    streams: tuple[int, ...]
    contexts: tuple[int, ...]
    batched_slots: int
    wide_streams: int
    verified_streams: tuple[int, ...]
    rows: tuple[int, ...]
    confidences: tuple[float, ...]
    repeats: int


LARGE = Sizes(
    1024, 512, (256, 16, 64, 4), (32768, 8192, 16384, 4096, 2048), 4096, 64, (1, 16, 64), (1, 8, 64), (0.0, 1.0), 30
)
SMALL = Sizes(24, 16, (4,), (96,), 64, 4, (1, 4), (1, 3), (0.0, 1.0), 2)


def sizes_of(geometry: str) -> Sizes:
    return SMALL if geometry == "tiny" else LARGE


def output_of(geometry: str, minutes: float) -> int:
    """Answers are as long as a run of eight minutes allows, and shorter where the first run has less."""
    return max(LEAST_OUTPUT, round(sizes_of(geometry).output * min(1.0, minutes / 8)))


@dataclass(frozen=True, slots=True)
class Stage:
    """Contestants that are measured alternately, `rounds` times: `streams` answers at once, all of the same lengths."""

    name: str
    streams: int
    prompt: int
    output: int
    contestants: tuple[str, ...]
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Forms:
    """Single decoding steps with CUDA graphs and without, by decode_step.py: each number of rows at each confidence."""

    name: str
    rows: tuple[int, ...]
    confidences: tuple[float, ...]
    context: int
    repeats: int


def stages(sizes: Sizes, device: str) -> list[Stage | Forms]:
    """The most important first; stages with the same contestants follow each other, so that few processes start."""

    def stage(name: str, streams: int, prompt: int, *contestants: str, rounds: int = 1) -> Stage:
        return Stage(name, streams, prompt, sizes.output, contestants, rounds)

    many = [stage(f"{n} streams", n, sizes.prompt, OURS, PLAIN) for n in sizes.streams]
    # A context's answer counts towards it.
    far = [stage(f"context {n}", 1, n - sizes.output, OURS, PLAIN) for n in sizes.contexts]
    wide = (*WIDE_GROUPS, OURS, PLAIN)
    verified = [
        stage(f"{VERIFIED_STAGE}, {n} stream{'s' * (n > 1)}", n, sizes.prompt, VERIFIED, UNDRAFTED, PLAIN, rounds=2)
        for n in sizes.verified_streams
    ]
    found: list[Stage | Forms] = [
        stage("1 stream", 1, sizes.prompt, OURS, PLAIN, rounds=2),
        many[0],
        far[0],
        stage(WIDE_STAGE, 1, sizes.prompt, *wide),
        stage(f"{WIDE_STAGE}, {sizes.wide_streams} streams", sizes.wide_streams, sizes.prompt, *wide),
        *verified,
        *many[1:],
        *far[1:],
        Forms(FORMS_STAGE, sizes.rows, sizes.confidences, sizes.prompt, sizes.repeats),
        stage("beside transformers", 1, sizes.prompt, OURS, PLAIN, PEER),
        stage("a cheaper graft", 1, sizes.prompt, FUSED, PLAIN),
    ]
    if device != "cpu":  # which has another int8
        found.append(stage("int8 weights", 1, sizes.prompt, OURS, OURS_INT8, PLAIN, PLAIN_INT8))
    return found
