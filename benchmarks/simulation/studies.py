"""What is asked of the simulation: load, memory, the step's budget, and how cost grows. Pure, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.settling import Settling
from simulation.costs import CostModel, StepWork
from simulation.simulator import DrawnSizes, Moment, Replay, drawn_with_mean
from simulation.simulator import replay as replay_trace
from simulation.summaries import Target, summary
from simulation.traces import Trace, TraceRow, known_prefix_tokens

LOADS = (0.5, 0.7, 0.85, 1.0, 1.2)
USUAL_LOAD = 0.85
POOLS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # in sequences of max_model_len
BUDGETS = (64, 128, 256, 512)
AT_ONCE = 1e9  # requests a second: all of them wait from the beginning


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model as the simulation knows it. settling: of its answers, whose groups are of one token then."""

    name: str
    costs: CostModel
    sizes: DrawnSizes
    settling: Settling | None = None

    def config(self, config: EngineConfig) -> EngineConfig:
        return config if self.settling is None else replace(config, groups="verified", settling=self.settling)


@dataclass(frozen=True, slots=True)
class Studies:
    """config: of every replay, but for what a study varies. say: gets one line a study."""

    config: EngineConfig
    scenarios: Sequence[Scenario]
    target: Target
    say: Callable[[str], None] = print

    @property
    def base(self) -> Scenario:
        return self.scenarios[0]

    @property
    def compared(self) -> list[Scenario]:
        """The base, what settles, and the last: in every study."""
        settled = [scenario for scenario in self.scenarios[1:-1] if scenario.settling is not None]
        return [self.scenarios[0], *settled, self.scenarios[-1]]

    def capacity(self, trace: Trace) -> float:
        """Requests a second that the base gets done when all of them wait from the beginning."""
        result = self._run(trace.at_rate(AT_ONCE), self.base)
        return len(result.outcomes) / result.seconds

    def loads(self, trace: Trace, capacity: float, loads: Sequence[float] = LOADS) -> list[dict[str, Any]]:
        """The compared ones at each of the loads, all at the usual one; a load of 1 brings as many
        requests a second as the base can do."""
        rows = []
        for load in loads:
            timed = trace.at_rate(load * capacity)
            for scenario in self.scenarios if load == USUAL_LOAD else self.compared:
                self.say(f"{trace.name}: load {load:g}, {scenario.name}")
                result = self._run(timed, scenario)
                figures = summary(result, self.config, self.target)
                rows.append({"trace": trace.name, "load": load, "model": scenario.name, **figures})
        return rows

    def pools(self, trace: Trace, capacity: float) -> list[dict[str, Any]]:
        """The usual load on smaller and smaller pools. findable_share: of all prompt tokens, those that a cache which
        forgets nothing, and knows a prompt as soon as it arrives, would find."""
        timed = trace.at_rate(USUAL_LOAD * capacity)
        findable = sum(known_prefix_tokens(timed)) / sum(row.prompt_tokens for row in timed.rows)
        rows = []
        for pool in POOLS:
            num_blocks = -(-int(pool * self.config.max_model_len) // self.config.block_size)
            config = replace(self.config, num_blocks=num_blocks)
            for scenario in self.compared:
                self.say(f"{trace.name}: pool of {pool:g} contexts, {scenario.name}")
                figures = summary(self._run(timed, scenario, config), config, self.target)
                rows.append(
                    {"trace": trace.name, "pool": pool, "model": scenario.name, "findable_share": findable, **figures}
                )
        return rows

    def budgets(self, trace: Trace, capacity: float) -> list[dict[str, Any]]:
        """The usual load with other slot budgets of a step, max_num_batched_slots."""
        timed, rows = trace.at_rate(USUAL_LOAD * capacity), []
        for budget in [n for n in BUDGETS if n >= self.config.max_num_seqs]:
            config = replace(self.config, max_num_batched_slots=budget)
            for scenario in self.compared:
                self.say(f"{trace.name}: {budget} slots a step, {scenario.name}")
                figures = summary(self._run(timed, scenario, config), config, self.target)
                rows.append({"trace": trace.name, "budget": budget, "model": scenario.name, **figures})
        return rows

    def slots_over_time(self, trace: Trace, capacity: float, scenario: Scenario) -> list[Moment]:
        return self._run(trace.at_rate(USUAL_LOAD * capacity), scenario).moments

    def growth(self, means: Sequence[float], max_group: int) -> list[dict[str, Any]]:
        """One request alone: slots that the pool gave it between its first token and its end, a token of the answer."""
        prompt, output = self.config.max_model_len // 8, self.config.max_model_len // 2
        trace, rows = Trace("one request", [TraceRow("1", 0.0, prompt, output)]), []
        for mean in means:
            sizes = drawn_with_mean(mean, max_group)
            result = replay_trace(trace, self.config, self.base.costs, sizes)
            first = next(moment for moment in result.moments if moment.used_slots)
            last = max(result.moments, key=lambda moment: moment.used_slots)
            [outcome] = result.outcomes
            rows.append(
                {
                    "mean_group": output / len(outcome.group_sizes),
                    "slots_a_token": (last.used_slots - first.used_slots) / output,
                    "one_over_g": len(outcome.group_sizes) / output,
                }
            )
        return rows

    def costs(self, scenario: Scenario) -> list[dict[str, Any]]:
        """What whole batches of equal requests cost, through the scheduler: one of three lengths varies at a time.
        decoding_seconds: of steps that only decode, all of them together from the end of their prompts on."""
        cases = [("streams", n, n, 256, 64) for n in (1, 2, 4, 8, 16, 32, 64)]
        cases += [("context", n, 8, n, 64) for n in (128, 512, 1024, 2048, 4096)]
        cases += [("output", n, 8, 256, n) for n in (32, 128, 512, 1024, 2048)]
        rows = []
        for varied, value, streams, prompt, output in cases:
            if streams > self.config.max_num_seqs or prompt + output > self.config.max_model_len:
                continue
            trace = Trace(f"{streams} equal", [TraceRow(str(i), 0.0, prompt, output) for i in range(streams)])
            result = self._run(trace, scenario)
            decoding = decoding_seconds(scenario, streams, prompt, output)
            rows.append(
                {
                    "model": scenario.name,
                    "varied": varied,
                    "value": value,
                    "seconds": result.seconds,
                    "tokens_per_second": streams * output / result.seconds,
                    "decoding_seconds": decoding,
                    "decoding_seconds_a_token": decoding / output,
                }
            )
        return rows

    def _run(self, trace: Trace, scenario: Scenario, config: EngineConfig | None = None) -> Replay:
        return replay_trace(trace, scenario.config(config or self.config), scenario.costs, scenario.sizes)


def decoding_seconds(scenario: Scenario, streams: int, prompt: int, output: int) -> float:
    """Of `streams` answers of `output` tokens that are decoded together, each behind `prompt` slots."""
    left, slots, seconds, index = [output] * streams, [prompt] * streams, 0.0, 0
    while going := [i for i in range(streams) if left[i]]:
        sizes = [min(left[i], scenario.sizes.size(str(i), index)) for i in going]
        for i, size in zip(going, sizes, strict=True):
            left[i], slots[i] = left[i] - size, slots[i] + 1
        context, micro_rows = sum(slots[i] for i in going), sum(sizes) - len(going)
        seconds += scenario.costs.seconds(StepWork(len(going), len(going), context, 0, 0, max(sizes) - 1, micro_rows))
        index += 1
    return seconds
