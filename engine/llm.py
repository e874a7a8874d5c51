"""LLM: the offline API. It drives an EngineCore in the caller's thread; no server, no asyncio, no other thread."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, Unpack

from hamburger.engine.core.core import EngineCore
from hamburger.engine.generation_result import GenerationResult, result_of
from hamburger.engine.request import AnswerBuilder, GenerationRequest, RequestUpdate, resolve_request
from hamburger.engine.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults, recommended_defaults
from hamburger.engine.text.detokenizer import TextDecoder
from hamburger.engine.text.stop_strings import StopStrings
from hamburger.engine.types.config import EngineArgs, LLMSettings
from hamburger.engine.types.errors import HamburgerError, InvalidRequest, OutOfMemory, QueueTimeout, shown
from hamburger.engine.types.messages import AbortRequest, EngineInfo, LoadLora, SubmitRequest, UnloadLora
from hamburger.engine.types.sampling_params import SamplingParams

Message = Mapping[str, Any]


class ChatTokenizer(TextDecoder, Protocol):
    """What LLM needs of a tokenizer; engine.text.tokenizer.Tokenizer is one."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str: ...


_STOPS_SHARED = 8  # sets of stop strings among requests
_CHAT = 'a list of {"role": ..., "content": ...}'
# What vLLM's chat takes; a template, which ignores what it does not know, would get it as a variable.
_NO_VARIABLES = {
    "use_tqdm": "use progress",
    "lora_request": "use load_lora, and lora",
    "chat_template_kwargs": "give each of its names as an argument",
    "chat_template": "the model's own is used",
}
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class LLM:
    """A model, ready to generate.

        llm = LLM()
        [result] = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(temperature=0))

    settings: fields of EngineArgs, without those of a server's queue. on_progress gets one line for people at the start
    of each stage of loading. Raises what building the engine raises (a wrong model, too little memory), and TypeError
    for a keyword that is no setting. One thread at a time may use it.
    With a tensor_parallel_size above 1 there are processes beside this one, which end with the LLM. An error or Ctrl-C
    in the middle of a step ends them, and every later call raises EngineDead.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
        *,
        on_progress: Callable[[str], None] = lambda line: None,
        **settings: Unpack[LLMSettings],
    ) -> None:
        # Imported here because they import torch, which the import of this package must not.
        from hamburger.engine.build import build_core
        from hamburger.engine.text.tokenizer import Tokenizer
        from hamburger.model.checkpoints.sources import resolve_source

        for name in settings:
            if name not in LLMSettings.__annotations__:
                raise TypeError(f"LLM() got an unexpected keyword argument {name!r}")
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        base = os.fspath(base) if isinstance(base, os.PathLike) else base
        # A long list of prompts may take its time.
        args = EngineArgs(model=model, base=base, max_queue_seconds=math.inf, **settings)
        source = resolve_source(model, base)
        defaults = recommended_defaults(source)
        core, info = build_core(args, on_progress)
        self._set_up(core, info, Tokenizer.load(source.tokenizer_path), defaults)

    @classmethod
    def from_core(
        cls,
        core: EngineCore,
        info: EngineInfo,
        tokenizer: ChatTokenizer,
        sampling_defaults: SamplingDefaults = OPENAI_DEFAULTS,
    ) -> LLM:
        """An LLM on an engine that was built elsewhere."""
        llm = cls.__new__(cls)
        llm._set_up(core, info, tokenizer, sampling_defaults)
        return llm

    def _set_up(
        self, core: EngineCore, info: EngineInfo, tokenizer: ChatTokenizer, sampling_defaults: SamplingDefaults
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._sampling_defaults = sampling_defaults
        self._core = core
        self._is_running = False
        self._loras: dict[str, int] = {}  # their numbers
        self._num_loras = 0

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's files recommend (generation_config.json, or the GGUF file)."""
        recommended: dict[str, Any] = {**self._sampling_defaults}
        return SamplingParams(**recommended)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        lora: str | None = None,
    ) -> list[GenerationResult]:
        """Continue each prompt (a text, or token ids); the results come in the prompts' order.

        sampling_params: one for all prompts, or one a prompt; None: get_default_sampling_params().
        progress: a bar on stderr. lora: the name of a loaded adapter that answers; None: the model itself.
        Raises ValueError unless there are as many of them as prompts, and, before any work, InvalidRequest or
        TokenizerError with a note that says which prompt it is about. A grammar that cannot be used, or that an answer
        leaves, is told when it is come to. After an error or Ctrl-C the next call starts afresh.
        """

        def encode(_: int, prompt: str | Sequence[int]) -> Sequence[int]:
            return self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt

        prompts = [prompts] if isinstance(prompts, str) else _listed("prompts", "a text or a list of prompts", prompts)
        return self._generate([*_each(encode, prompts)], sampling_params, progress, lora, goes_on=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        lora: str | None = None,
        **template_kwargs: Any,
    ) -> list[GenerationResult]:
        """Answer one conversation or several, written with the model's chat template; otherwise as `generate`.

        template_kwargs go to the template (such as add_generation_prompt, continue_final_message). Raises TypeError for
        names of vLLM's arguments, which have another one here.
        """
        for name in _NO_VARIABLES.keys() & template_kwargs:
            raise TypeError(f"LLM.chat() got an unexpected keyword argument {name!r}: {_NO_VARIABLES[name]}")

        def encode(_: int, chat: Sequence[Message]) -> list[int]:
            turns = [dict(_message(turn)) for turn in _listed("messages", _CHAT, chat)]
            if not turns:
                raise InvalidRequest("The conversation is empty: it needs at least one message.", "messages")
            return self.tokenizer.encode(self.tokenizer.apply_chat_template(turns, **template_kwargs))

        chats = _listed("messages", _CHAT, messages)
        chats = [chats] if chats and isinstance(chats[0], Mapping) else chats
        goes_on = bool(template_kwargs.get("continue_final_message"))
        return self._generate([*_each(encode, chats)], sampling_params, progress, lora, goes_on=goes_on)

    def load_lora(self, name: str, path: str | Path) -> None:
        """Load the LoRA adapter in a folder that PEFT wrote, for `lora=name`; there is room for `max_loras`. Raises
        InvalidRequest for one that cannot be loaded, or a name that is taken or none."""
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"name is {shown(name)}: it must be a text, and not empty.", "name")
        if not isinstance(path, str | Path):
            raise InvalidRequest(f"path is {shown(path)}: it must be the path of a folder.", "path")
        if name in self._loras:
            raise InvalidRequest(f"The LoRA adapter {name!r} is loaded already: unload it first.")
        self._num_loras += 1
        if (error := self._core.load_lora(LoadLora(self._num_loras, str(path)))) is not None:
            raise InvalidRequest(error)
        self._loras[name] = self._num_loras

    def unload_lora(self, name: str) -> None:
        """Raises InvalidRequest for a name that is not loaded."""
        self._core.unload_lora(UnloadLora(self._lora_number(name)))
        del self._loras[name]

    def _lora_number(self, name: str) -> int:
        if not isinstance(name, str) or name not in self._loras:
            raise InvalidRequest(f"The LoRA adapter {shown(name)} is not loaded: use load_lora.", "lora")
        return self._loras[name]

    def generate_each(
        self,
        requests: Iterable[tuple[Sequence[int], SamplingParams]],
        on_update: Callable[[RequestUpdate], None] = lambda update: None,
    ) -> Generator[tuple[int, GenerationResult], None, None]:
        """Yield (index, result) of each request (prompt ids, params) as soon as it is finished.

        Requests are taken one by one as seats come free, so their number needs no memory and no answer waits for a
        slower one. on_update: called with what every group adds. Raises InvalidRequest, with a note that says which
        request it is about, when such a request is reached. Until the iterator is exhausted or closed, every other
        call that generates raises RuntimeError; closing it gives the unfinished requests up.
        """
        resolved = _each(self._resolve, requests)
        with closing(self._run(resolved, on_update)) as finished:
            for request, result in finished:
                yield int(request.request_id), result

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        lora: str | None,
        *,
        goes_on: bool,
    ) -> list[GenerationResult]:
        sampling_params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(prompts)
        else:
            params = _listed("sampling_params", "SamplingParams, or a list with one a prompt", sampling_params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(params)} sampling params.")
        number = 0 if lora is None else self._lora_number(lora)
        resolved = _each(self._resolve, zip(prompts, params, strict=True))
        requests = [replace(request, lora=number) for request in resolved]
        from hamburger.engine.progress_bar import progress_of_answers  # only this shows something

        bar = progress_of_answers(len(requests), visible=progress)
        with bar as show, closing(self._run(requests, show, goes_on=goes_on)) as finished:
            results = {request.request_id: result for request, result in finished}
        return [results[request.request_id] for request in requests]

    def _resolve(self, number: int, request: tuple[Sequence[int], SamplingParams]) -> SubmitRequest:
        prompt, params = request
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params holds {shown(params)}: use SamplingParams.", "sampling_params")
        try:
            if isinstance(prompt, bytes | bytearray):  # a text that was read as bytes, not ids
                raise TypeError
            ids = [index(token_id) for token_id in prompt]
        except TypeError:
            wanted = "a text or a list of token ids"
            raise InvalidRequest(f"A prompt must be {wanted}, not {shown(prompt)}.", "prompts") from None
        return resolve_request(GenerationRequest(str(number), ids, params), self.info, time.monotonic())

    def _run(
        self, requests: Iterable[SubmitRequest], show: Callable[[RequestUpdate], None], *, goes_on: bool = False
    ) -> Generator[tuple[SubmitRequest, GenerationResult], None, None]:
        """Each request with its result, as it finishes; the next one is taken when a seat comes free. goes_on: as in
        GenerationRequest."""
        if self._is_running:
            raise RuntimeError("This LLM is generating already: exhaust or close the iterator of generate_each first.")
        waiting, running = iter(requests), dict[str, _RunningRequest]()
        self._is_running = True
        stop_strings = lru_cache(maxsize=_STOPS_SHARED)(StopStrings)
        try:
            while True:
                # LLM fills the seats itself, so the engine's own queue stays short, however long the list is.
                for request in islice(waiting, self._core.config.max_num_seqs - len(running)):
                    self._core.add(replace(request, arrival_time=time.monotonic()))
                    answer = AnswerBuilder(self.tokenizer, request.params, self.info, stop_strings, goes_on=goes_on)
                    running[request.request_id] = _RunningRequest(request, answer, [])
                if not running:
                    return
                if not self._core.has_work:
                    raise RuntimeError("the engine ran out of work before an answer was finished.")
                step = self._core.step()
                for output in step.outputs:
                    request, answer, updates = running[output.request_id]
                    update = answer.push(output)
                    updates.append(update)
                    show(update)
                    if update.finish_reason is not None:
                        self._core.abort(AbortRequest(output.request_id))  # a stop string, which it does not know
                        del running[output.request_id]
                        yield request, result_of(request.prompt_ids, updates, update.finish_reason)
                errors = {"grammar": InvalidRequest, "out_of_memory": OutOfMemory}
                for failure in step.failures:
                    if failure.request_id in running:  # else a stop string ended it before
                        error = errors.get(failure.kind, QueueTimeout)(failure.message)
                        raise _about(error, failure.request_id)
        except BaseException:  # Ctrl-C and the iterator's end as well, and they may have come at any line of a step
            self._core.reset()
            raise
        finally:
            self._is_running = False


def _listed(name: str, wanted: str, value: Any) -> list[Any]:
    """What is given as a list. Raises InvalidRequest for anything else."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be {wanted}, not {shown(value)}.", name)
    return list(value)


def _message(turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise InvalidRequest(f"messages must be {_CHAT}, not hold {shown(turn)}.", "messages")
    return turn


def _each(do: Callable[[int, _In], _Out], prompts: Iterable[_In]) -> Iterator[_Out]:
    """What `do` makes of each prompt's number and the prompt; its errors say which one they are about."""
    for number, prompt in enumerate(prompts):
        try:
            yield do(number, prompt)
        except HamburgerError as error:
            raise _about(error, str(number)) from None


def _about(error: HamburgerError, request_id: str) -> HamburgerError:
    error.add_note(f"This is about prompt number {request_id}, counted from 0.")
    return error


class _RunningRequest(NamedTuple):
    request: SubmitRequest
    answer: AnswerBuilder
    updates: list[RequestUpdate]
