"""LLM: the offline API. It drives an EngineCore in the caller's thread; no server, no asyncio, no other thread."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Unpack

from hamburger.engine.core.core import EngineCore
from hamburger.engine.generation_result import GenerationResult, prompt_of, result_of, whole_results
from hamburger.engine.llm_inputs import (
    Message,
    Prompt,
    about,
    chat_turns,
    check_params,
    each,
    listed_chats,
    listed_prompts,
    params_of_each,
    priority_of_each,
    text_or_ids,
)
from hamburger.engine.request import AnswerBuilder, GenerationRequest, RequestUpdate, resolve_request
from hamburger.engine.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults, recommended_defaults
from hamburger.engine.text.detokenizer import TextDecoder
from hamburger.engine.text.stop_strings import StopStrings
from hamburger.engine.types.config import EngineArgs, LLMSettings
from hamburger.engine.types.errors import InvalidRequest, OutOfMemory, QueueTimeout, shown
from hamburger.engine.types.messages import AbortRequest, EngineInfo, LoadLora, SubmitRequest, UnloadLora
from hamburger.engine.types.sampling_params import SamplingParams


class ChatTokenizer(TextDecoder, Protocol):
    """What LLM needs of a tokenizer; engine.text.tokenizer.Tokenizer is one."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str: ...


_STOPS_SHARED = 8  # sets of stop strings among requests
# What vLLM's chat takes; a template, which ignores what it does not know, would get it as a variable.
_NO_VARIABLES = {
    "use_tqdm": "use progress",
    "lora_request": "use load_lora, and lora",
    "chat_template_kwargs": "give each of its names as an argument",
    "chat_template": "the model's own is used",
}


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
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        lora: str | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[GenerationResult]:
        """Continue each prompt; the results come in the prompts' order.

        prompts: one or several, each a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params: one for all prompts, or one a prompt; None: get_default_sampling_params().
        progress: a bar on stderr. lora: the name of a loaded adapter that answers; None: the model itself.
        priority: one for all prompts, or one a prompt: those of a lower number are answered first; None: 0.
        Raises ValueError unless there are as many of them as prompts, and, before any work, InvalidRequest or
        TokenizerError with a note that says which prompt it is about. A grammar that cannot be used, or that an answer
        leaves, is told when it is come to. After an error or Ctrl-C the next call starts afresh.
        """

        def encode(_: int, prompt: Prompt) -> tuple[list[int], str | None]:
            said = text_or_ids(prompt)
            if isinstance(said, str):
                return self.tokenizer.encode(said, add_special_tokens=True), said
            return said, None

        encoded = [*each(encode, listed_prompts(prompts))]
        return self._generate(encoded, sampling_params, progress, lora, priority, goes_on=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        lora: str | None = None,
        priority: int | Sequence[int] | None = None,
        **template_kwargs: Any,
    ) -> list[GenerationResult]:
        """Answer one conversation or several, written with the model's chat template; otherwise as `generate`.

        A message's content may be a list of text parts. template_kwargs go to the template (such as
        add_generation_prompt, continue_final_message). Raises TypeError for names of vLLM's arguments, which have
        another one here.
        """
        for name in _NO_VARIABLES.keys() & template_kwargs:
            raise TypeError(f"LLM.chat() got an unexpected keyword argument {name!r}: {_NO_VARIABLES[name]}")

        def encode(_: int, chat: Sequence[Message]) -> tuple[list[int], str | None]:
            text = self.tokenizer.apply_chat_template(chat_turns(chat), **template_kwargs)
            return self.tokenizer.encode(text), text

        encoded = [*each(encode, listed_chats(messages))]
        goes_on = bool(template_kwargs.get("continue_final_message"))
        return self._generate(encoded, sampling_params, progress, lora, priority, goes_on=goes_on)

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
        resolved = each(self._resolve, requests)
        with closing(self._run(chain.from_iterable(resolved), on_update)) as finished:
            yield from whole_results(finished)

    def _generate(
        self,
        encoded: Sequence[tuple[list[int], str | None]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        lora: str | None,
        priority: int | Sequence[int] | None,
        *,
        goes_on: bool,
    ) -> list[GenerationResult]:
        """encoded: the token ids of each prompt, and its text where there is one."""
        sampling_params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = params_of_each(sampling_params, len(encoded))
        priorities = priority_of_each(priority, len(encoded))
        number = 0 if lora is None else self._lora_number(lora)
        resolved = [*each(self._resolve, zip((ids for ids, _ in encoded), params, strict=True))]
        # Seats are taken in this order, and where memory ends the last ones give theirs up.
        first = sorted(range(len(encoded)), key=lambda i: priorities[i])
        requests = [replace(request, lora=number, priority=priorities[i]) for i in first for request in resolved[i]]
        from hamburger.engine.progress_bar import progress_of_answers  # only this shows something

        bar = progress_of_answers(len(requests), visible=progress)
        with bar as show, closing(self._run(requests, show, goes_on=goes_on)) as finished:
            results = dict(whole_results(finished))
        return [replace(results[i], prompt=text) for i, (_, text) in enumerate(encoded)]

    def _resolve(self, number: int, request: tuple[Sequence[int], SamplingParams]) -> list[SubmitRequest]:
        """One for each answer to prompt `number`, the first of that id; it scores the prompt for all."""
        prompt, params = request
        check_params(params)
        ids, now = text_or_ids(prompt), time.monotonic()
        if isinstance(ids, str):
            raise InvalidRequest("A prompt of generate_each must be a list of token ids.", "prompts")
        names = [str(number), *(f"{number}.{i}" for i in range(1, params.n))]
        requests = [
            resolve_request(GenerationRequest(name, ids, one), self.info, now)
            for name, one in zip(names, params.each_choice(params.n), strict=True)
        ]
        return [requests[0], *(replace(request, scores_prompt=False) for request in requests[1:])]

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
                        raise about(error, prompt_of(failure.request_id)[0])
        except BaseException:  # Ctrl-C and the iterator's end as well, and they may have come at any line of a step
            self._core.reset()
            raise
        finally:
            self._is_running = False


class _RunningRequest(NamedTuple):
    request: SubmitRequest
    answer: AnswerBuilder
    updates: list[RequestUpdate]
