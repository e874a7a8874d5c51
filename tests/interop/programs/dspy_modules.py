"""DSPy: dspy_modules.py URL MODEL; prints one line of JSON. Runs in the clients' environment."""

import asyncio
import json
import sys
from typing import Literal

import dspy
from dspy.lm15 import (
    AccessPolicy,
    EndpointSupport,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)
from dspy.streaming import StreamListener, StreamResponse

url, name = sys.argv[1:]
question = "Name the capital of France."


class Sort(dspy.Signature):
    """Say what kind of thing it is."""

    thing: str = dspy.InputField()
    kind: Literal["animal", "plant", "city"] = dspy.OutputField()


class Act(dspy.Signature):
    """Call a tool."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


# Of a name under openai/ DSPy knows no abilities, and asks in words alone. This says what the server can.
access = AccessPolicy(
    provider="burger",
    supports=EndpointSupport(complete=True, stream=True, models=True),
    auth_modes=("bearer",),
    base_url=url,
)
register_provider(
    ProviderDefinition.chat(access, compat=OpenAIChatCompat(stream_usage="include"), placeholder_key="none"),
    supports=ModelSupport(function_calling=True, response_schema=True),
)
settings = {"api_key": "none", "temperature": 0, "max_tokens": 60, "cache": False, "num_retries": 0}
lm = dspy.LM(f"burger/{name}", **settings)
known = dspy.LM(f"openai/{name}", api_base=url, **settings)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
sort = dspy.Predict(Sort)


async def four() -> list[str]:
    return [answer[0] for answer in await asyncio.gather(*(lm.acall(question) for _ in range(4)))]


async def streamed() -> list[str]:
    pieces = dspy.streamify(sort, stream_listeners=[StreamListener("kind")], is_async_program=False)(thing="Paris")
    return [piece.chunk async for piece in pieces if isinstance(piece, StreamResponse)]


def refusal(model: dspy.LM) -> str:
    try:
        model(question)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "answered"


# Other fields than the tool's are allowed by the schema that DSPy sends, and a small model adds them for ever.
forced = {"tool_choice": "required", "max_tokens": 60}
acting = dspy.Predict(Act)
with dspy.context(adapter=dspy.ChatAdapter(use_native_function_calling=True)):
    acted = acting(question="The weather in Oslo?", tools=[dspy.Tool(weather)], config=forced)
text = lm(question)[0]
print(
    json.dumps(
        {
            "text": text,
            "usage": lm.history[-1]["usage"],
            "known": known(question)[0],
            "asynchronous": asyncio.run(four()),
            "kind": sort(thing="Paris").kind,
            "streamed": asyncio.run(streamed()),
            "calls": [[call.name, call.args] for call in acted.calls.tool_calls],
            "unknown": refusal(dspy.LM("burger/other", **settings)),
            "too_long": refusal(lm.copy(max_tokens=20000)),
        }
    )
)
