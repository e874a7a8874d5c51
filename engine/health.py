"""Whether an engine lives, hangs or drains, from what is known of its steps. It decides; whoever asks acts."""

from __future__ import annotations

from dataclasses import dataclass

# A step is one macro-step; the longest that a prefill chunk may take on a slow CPU is far below this.
HUNG_IN_STEP_SECONDS = 120.0
# Between steps the engine only takes its messages: it is never here for long while there is work.
HUNG_BETWEEN_STEPS_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """alive: the loop runs. seconds_in_step: None between steps. seconds_without_step: since the last step's end
    or the oldest request that waits for the core came, the later; 0 where none waits. error: what it died of, for
    operators. restarting: it is dead, and starts again."""

    alive: bool
    draining: bool
    num_running: int
    num_waiting: int
    seconds_in_step: float | None
    seconds_without_step: float
    error: str | None
    restarting: bool = False


def liveness_fault(state: EngineHealth) -> str | None:
    """Why the process should be restarted, or None; in words for everybody."""
    if state.draining and not state.error:  # one engine of several may have ended before the others
        return hang_fault(state)
    if not state.alive and not state.restarting:
        return "the engine is dead" if state.error else "the engine has stopped"
    return hang_fault(state)


def hang_fault(state: EngineHealth) -> str | None:
    """How a living engine hangs, or None: it may be busy in a long step, but not for ever."""
    if not state.alive:
        return None
    if not state.num_running and not state.num_waiting:
        return None
    if state.seconds_in_step is not None:
        hangs = state.seconds_in_step > HUNG_IN_STEP_SECONDS
        return f"one step has taken {state.seconds_in_step:.0f} s" if hangs else None
    hangs = state.seconds_without_step > HUNG_BETWEEN_STEPS_SECONDS
    return f"no step for {state.seconds_without_step:.0f} s, though requests wait" if hangs else None
