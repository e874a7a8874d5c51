"""From settings to running models: each found, given a tokenizer and an engine's process, and kept. Knows no HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.hosts.process_host import Worker
from hamburger.engine.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults, recommended_defaults
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.transport.cpu_placement import CpuPlacement
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.errors import HamburgerError, TokenizerError
from hamburger.model.checkpoints.sources import ModelSource, resolve_source
from hamburger.server.api.model_context import ModelContext, is_alias
from hamburger.server.app import model_context
from hamburger.server.config import ServeSettings, SettingsError
from hamburger.server.operation.loop_watch import watch_loop
from hamburger.server.operation.metrics import ServerMetrics
from hamburger.server.operation.supervisor import Supervisor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that can be launched: its files are here, and its settings fit together."""

    name: str
    settings: ServeSettings
    args: EngineArgs
    tokenizer: Tokenizer
    sampling_defaults: SamplingDefaults = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A launched model. supervision: starts its engine again, and ends when that is dead for good. hang_watch: has an
    engine that hangs write its stacks."""

    context: ModelContext
    supervision: asyncio.Task[None]
    hang_watch: asyncio.Task[None]


def engine_arguments(settings: ServeSettings) -> list[tuple[ServeSettings, EngineArgs]]:
    """Each model's settings and what its engine is asked for. Raises SettingsError or ConfigError.

    Engines that may be on one device divide its free memory.
    """
    models = settings.models()
    found: list[tuple[ServeSettings, EngineArgs]] = []
    for model in models:
        try:
            model.auto_confidence()
            found.append((model, model.engine_args()))
        except ValueError as error:
            raise _naming_model(model.served_model_name, error, len(models)) from error
    asked = [args for _, args in found]
    if settings.allow_lora_loading and not any(args.max_loras for args in asked):
        raise SettingsError(
            "allow_lora_loading is on, but max_loras is 0: say how many adapters there is to be room for."
        )
    return [
        (model, replace(args, num_engines=sum(_may_share_device(args, other) for other in asked)))
        for model, args in found
    ]


def _may_share_device(args: EngineArgs, other: EngineArgs) -> bool:
    """Whether two engines may be on one device."""
    devices = {args.device, other.device}
    if len(devices) == 1 or "auto" in devices:
        return True
    # Split ones take the first GPUs, whichever another names.
    return "cpu" not in devices and max(args.tensor_parallel_size, other.tensor_parallel_size) > 1


def find_models(arguments: Sequence[tuple[ServeSettings, EngineArgs]]) -> list[FoundModel]:
    """Raises CheckpointError, TokenizerError, or SettingsError for two models of one name."""
    found: list[FoundModel] = []
    tokenizers: dict[Path, Tokenizer] = {}  # a HAMburger and its base have the same: 30 MB that are not needed twice
    for settings, args in arguments:
        try:
            source = resolve_source(args.model, args.base)
            path = source.tokenizer_path
            tokenizer = tokenizers[path] = tokenizers.get(path) or Tokenizer.load(path)
            if settings.chat_template is not None or settings.chat_template_kwargs:
                tokenizer = tokenizer.with_chat(_chat_template(settings), settings.chat_template_kwargs)
            if settings.chat_template is None:
                _warn_of_template(tokenizer, path)
            defaults = sampling_defaults(settings, source)
        except (ValueError, HamburgerError) as error:
            raise _naming_model(settings.served_model_name, error, len(arguments)) from error
        name = settings.served_model_name or source.name
        if any(other.name == name for other in found):
            raise SettingsError(f"two models have the name {name}: give one another, in also or served_model_name.")
        found.append(FoundModel(name, settings, args, tokenizer, defaults))
    _check_names(found)
    return found


def _warn_of_template(tokenizer: Tokenizer, path: Path) -> None:
    """The model may be meant for completions alone."""
    try:
        tokenizer.check_templates()
    except TokenizerError as error:
        fault = str(error).rstrip(".")
        logger.warning("%s: %s. Chats will be refused: give it another by chat_template.", path, fault)


def _check_names(found: Sequence[FoundModel]) -> None:
    """Raises SettingsError for a name that means two models, or may."""
    owners = [("a model", "served_model_name or also", model.name) for model in found]
    owners += [("a model", "model_alias", alias) for model in found for alias in model.settings.model_alias]
    models = [name for *_, name in owners]
    owners += [("a LoRA adapter", "lora", adapter.name) for model in found for adapter in model.settings.lora]
    names = [name for *_, name in owners]
    for owner, setting, name in owners:
        if models.count(name) > 1:
            raise SettingsError(f"two models, or one twice, have the name {name}: rename it in model_alias.")
        if names.count(name) > 1:
            raise SettingsError(f"a LoRA adapter and another adapter or model have the name {name}: rename it in lora.")
        for other in names:
            if is_alias(name, other):
                message = f"{owner} has the name {name}, which is {other} with a confidence (NAME@c)"
                raise SettingsError(f"{message}: rename it in {setting}.")


def _chat_template(settings: ServeSettings) -> str | None:
    if settings.chat_template is None:
        return None
    try:
        template = settings.chat_template.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingsError(f"chat_template {settings.chat_template} cannot be read as UTF-8 text: {error}.") from error
    if not template.strip():  # every chat would be an empty prompt
        raise SettingsError(f"chat_template {settings.chat_template} is empty: write a template, or leave it out.")
    return template


def sampling_defaults(settings: ServeSettings, source: ModelSource) -> SamplingDefaults:
    """What requests are sampled by that do not say. Raises CheckpointError."""
    match settings.sampling_defaults:
        case "model":
            return recommended_defaults(source)
        case "openai":
            return OPENAI_DEFAULTS
        case given:
            return given


@asynccontextmanager
async def running_models(
    models: Sequence[FoundModel], progress: Callable[[str], None], worker: Worker | None = None
) -> AsyncIterator[list[RunningModel]]:
    """Launch one engine after another, so that each sees the memory that the ones before took. At the end all are
    ended.

    worker: the first one's process, where it was started before.

    Raises what the first that cannot be launched raises; those before it are ended.
    """
    async with AsyncExitStack() as stack:
        found: list[RunningModel] = []
        metrics: ServerMetrics | None = None
        placement = CpuPlacement()
        for model in models:
            several = len(models) > 1
            model_progress = _prefixed(progress, model.name) if several else progress
            metrics = ServerMetrics(model.name, beside=metrics)
            try:
                launched = await launch_model(
                    model,
                    model_progress,
                    metrics,
                    title=f"The engine of {model.name}" if several else "The engine",
                    worker=None if found else worker,
                    placement=placement,
                )
            except (ValueError, HamburgerError) as error:
                raise _naming_model(model.name, error, len(models)) from error
            stack.push_async_callback(launched.context.engine.shutdown, 0)
            stack.callback(launched.context.close)
            stack.callback(launched.supervision.cancel)
            stack.callback(launched.hang_watch.cancel)
            found.append(launched)
        loop_watch = asyncio.create_task(watch_loop(found[0].context.metrics.on_loop_lag))
        stack.callback(loop_watch.cancel)
        yield found


async def launch_model(
    model: FoundModel,
    progress: Callable[[str], None],
    metrics: ServerMetrics,
    *,
    title: str = "The engine",
    worker: Worker | None = None,
    placement: CpuPlacement | None = None,
) -> RunningModel:
    """Start the model's engine in a process of its own; whoever asked for it ends it. Raises what building it raises.

    metrics: its observer. title: what the log calls the engine. worker: its process, where it was started before.
    placement: one for all engines of this process.
    """
    settings = model.settings
    supervisor = Supervisor(
        model.args,
        progress,
        settings.engine_restarts,
        settings.log_level,
        settings.log_format,
        title,
        worker,
        placement,
    )
    engine = await AsyncEngine.launch(supervisor.host, model.tokenizer, metrics, auto=settings.auto_confidence())
    for adapter in settings.lora:
        try:
            await engine.load_lora(adapter.name, adapter.path)
        except HamburgerError as error:
            await engine.shutdown(0)
            raise SettingsError(f"lora {adapter.name}: {error}") from error
    return RunningModel(
        model_context(engine, model.tokenizer, metrics, settings, model.name, model.sampling_defaults),
        supervision=asyncio.create_task(supervisor.keep_alive(engine)),
        hang_watch=asyncio.create_task(supervisor.watch_for_hangs(engine)),
    )


def _prefixed(progress: Callable[[str], None], name: str) -> Callable[[str], None]:
    return lambda line: progress(f"{name}: {line}")


def _naming_model(name: str | None, error: Exception, num_models: int) -> Exception:
    """The error, which says of which model it is where there are several."""
    return error if num_models == 1 else SettingsError(f"{name or 'the first model'}: {error}")
