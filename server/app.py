"""create_app: the ASGI application around one engine or several. It wires; everything else lives beside it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from fastapi import Depends, FastAPI

from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.grammar.processes import GrammarProcesses
from hamburger.engine.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from hamburger.server.api.answering import Answering
from hamburger.server.api.auth import ApiKeys, require_api_key
from hamburger.server.api.errors import add_error_handlers
from hamburger.server.api.long_texts import LongTexts
from hamburger.server.api.lora_routes import lora_routes
from hamburger.server.api.model_context import ModelContext, ServedModel
from hamburger.server.api.openapi import document
from hamburger.server.api.origins import require_known_page
from hamburger.server.api.routes import model_routes, operation_routes
from hamburger.server.api.served_models import ServedModels
from hamburger.server.api.tokenizer_routes import tokenizer_routes
from hamburger.server.bodies.chat import ChatBody
from hamburger.server.bodies.completion import CompletionBody
from hamburger.server.bodies.lora import LoadLoraBody, UnloadLoraBody
from hamburger.server.bodies.tokenizer import DetokenizeBody, TokenizeBody
from hamburger.server.completions.routes import completion_routes
from hamburger.server.config import ServeSettings
from hamburger.server.messages.body import MessagesBody, PromptBody
from hamburger.server.messages.errors import PATH as MESSAGES
from hamburger.server.messages.errors import messages_error
from hamburger.server.messages.routes import message_routes
from hamburger.server.operation.key_limits import KeyLimits
from hamburger.server.operation.metrics import ServerMetrics
from hamburger.server.operation.middleware import RequestIds, allow_origins
from hamburger.server.operation.tracing import RequestTraces
from hamburger.server.playground import playground_routes
from hamburger.server.responses.body import ResponsesBody
from hamburger.server.responses.routes import response_routes
from hamburger.server.responses.store import ResponseStore
from hamburger.server.server_tokenizer import ServerTokenizer
from hamburger.server.tools.reasoning import markers_of
from hamburger.server.tools.tool_parsers import family_of


def create_app(
    engine: AsyncEngine, tokenizer: ServerTokenizer, metrics: ServerMetrics, settings: ServeSettings, model_name: str
) -> FastAPI:
    """The application for one launched engine; model_context says what it is given."""
    return create_app_of([model_context(engine, tokenizer, metrics, settings, model_name)], settings)


def model_context(
    engine: AsyncEngine,
    tokenizer: ServerTokenizer,
    metrics: ServerMetrics,
    settings: ServeSettings,
    model_name: str,
    sampling_defaults: SamplingDefaults = OPENAI_DEFAULTS,
) -> ModelContext:
    """What requests to one model need. The engine was launched, and is used but not ended.

    metrics: the observer that `engine` was launched with. model_name: what clients call the model.
    sampling_defaults: of requests that do not say.
    """
    grammars = GrammarProcesses(
        tokenizer.loader, engine.info.vocab_size, engine.info.eos_token_ids, compact_json=settings.compact_json
    )
    family = settings.tool_parser if settings.tool_parser != "auto" else family_of(tokenizer.tool_template)
    metrics.add_gauges(engine)
    text_settings = repr((tokenizer.chat_template, settings.chat_template_kwargs, sorted(sampling_defaults.items())))
    served = ServedModel(model_name, engine.info, text_settings, aliases=settings.model_alias)
    markers = markers_of(tokenizer)
    return ModelContext(
        engine,
        tokenizer,
        metrics,
        settings,
        served,
        grammars,
        family,
        markers,
        sampling_defaults,
        long_prompts=LongTexts(2),
        counted_texts=LongTexts(1),
    )


def create_app_of(
    contexts: Sequence[ModelContext],
    settings: ServeSettings,
    responses: ResponseStore | None = None,
    traces: RequestTraces | None = None,
    keys: ApiKeys | None = None,
) -> FastAPI:
    """The application for several models, whose metrics are rendered together. `settings` are the server's own.

    responses: where they are stored; None: in memory, whatever response_file says.
    traces: what makes spans of requests; None: nobody, whatever otlp_traces_endpoint says.
    keys: those that are let in; None: those of the settings, for ever.
    """
    models = ServedModels(contexts)
    # A redirect would name the host and scheme that the request names, which are not those behind a proxy.
    app = FastAPI(title="HAMburger Serve", version=version("hamburger-serve"), redirect_slashes=False)
    add_error_handlers(app, models.count_failure, {MESSAGES: messages_error})
    app.state.count_refusal = models.count_refusal
    answering = Answering(models, KeyLimits(settings))
    key_needed = [Depends(require_api_key(keys or ApiKeys(settings.api_keys())))]
    page_known = [Depends(require_known_page(settings.cors_origin)), *key_needed]
    app.include_router(completion_routes(answering), dependencies=page_known)
    app.include_router(message_routes(answering), dependencies=page_known)
    store = ResponseStore(settings.response_store) if responses is None else responses
    app.include_router(response_routes(answering, store), dependencies=page_known)
    app.include_router(model_routes(models), dependencies=key_needed)
    app.include_router(lora_routes(models, settings), dependencies=page_known)
    app.include_router(tokenizer_routes(models), dependencies=page_known)
    app.include_router(operation_routes(models), dependencies=[] if settings.public_operation else key_needed)
    if settings.playground:
        app.include_router(playground_routes())
    bodies = (ChatBody, CompletionBody, MessagesBody, PromptBody, ResponsesBody, TokenizeBody, DetokenizeBody)
    document(app, *bodies, LoadLoraBody, UnloadLoraBody)
    allow_origins(app, settings.cors_origin)
    app.add_middleware(RequestIds, logs=settings.access_log, traces=traces)  # the last one added is the outermost
    return app
