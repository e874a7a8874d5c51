"""LlamaIndex: llama_index_chat.py URL MODEL; prints one line of JSON. Runs in the clients' environment."""

import asyncio
import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field


class Ship(BaseModel):
    """A ship."""

    model_config = ConfigDict(extra="forbid")  # else a small model never ends

    name: str = Field(max_length=40)
    year: int = Field(ge=1000, le=2100)


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


url, name = sys.argv[1:]
at = {"api_base": url, "api_key": "none", "model": name, "context_window": 1024, "max_retries": 0, "temperature": 0}
llm = OpenAILike(**at, max_tokens=32, is_chat_model=True, is_function_calling_model=True)
longer = OpenAILike(**at, max_tokens=200, is_chat_model=True, is_function_calling_model=True)
schemas = OpenAILike(**at, max_tokens=200, is_chat_model=True, should_use_structured_outputs=True)
plain = OpenAILike(**at, max_tokens=32, is_chat_model=False)
question = [ChatMessage(role="user", content="Name the capital of France.")]
invent = PromptTemplate("Invent a {thing}.")


async def four() -> list[str]:
    return [answer.message.content for answer in await asyncio.gather(*(llm.achat(question) for _ in range(4)))]


whole = llm.chat(question)
pieces = [piece.delta for piece in llm.stream_chat(question) if piece.delta]
called = longer.chat_with_tools([FunctionTool.from_defaults(weather)], "The weather in Oslo?", tool_required=True)
print(
    json.dumps(
        {
            "text": whole.message.content,
            "usage": whole.raw.usage.completion_tokens,
            "streamed": "".join(pieces),
            "pieces": len(pieces),
            "asynchronous": asyncio.run(four()),
            "completion": plain.complete("One, two,").text,
            "completion_streamed": "".join(piece.delta for piece in plain.stream_complete("One, two,")),
            "calls": [
                [call.tool_name, sorted(call.tool_kwargs)] for call in longer.get_tool_calls_from_response(called)
            ],
            "ships": [model.structured_predict(Ship, invent, thing="ship").model_dump() for model in (longer, schemas)],
        }
    )
)
