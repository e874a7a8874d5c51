"""LangChain: langchain_chat.py URL MODEL COMPOSED_URL; prints one line of JSON. Runs in the clients' environment."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Ship(BaseModel):
    """A ship."""

    name: str
    year: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


url, name, composed_url = sys.argv[1:]
model = ChatOpenAI(base_url=url, api_key="none", model=name, temperature=0, max_tokens=32)
question = "Name the capital of France."

whole = model.invoke(question)
chunks = list(model.stream(question, stream_usage=True))
streamed = chunks[0]
for chunk in chunks[1:]:
    streamed += chunk
short = model.model_copy(update={"max_tokens": 200})
composed = ChatOpenAI(base_url=composed_url, api_key="none", model=name, temperature=0, max_tokens=200)
called = short.bind_tools([weather], tool_choice="required", strict=True).invoke("What is the weather in Oslo?")
logged = model.bind(logprobs=True, top_logprobs=2).invoke(question)

print(
    json.dumps(
        {
            "text": whole.content,
            "usage": whole.usage_metadata,
            "tokens_per_kv": {
                confidence: composed.bind(extra_body={"confidence": confidence})
                .invoke("Count from 1 to 20.")
                .response_metadata["token_usage"]["tokens_per_kv"]
                for confidence in (0.3, 1.0)
            },
            "streamed": streamed.content,
            "streamed_usage": streamed.usage_metadata,
            "pieces": len(chunks),
            "batch": [answer.content for answer in model.batch([question] * 8)],
            "structured": short.with_structured_output(Ship).invoke("Invent a ship.").model_dump(),
            "tool_calls": [call["name"] for call in called.tool_calls],
            "logprobs": len(logged.response_metadata["logprobs"]["content"]),
        }
    )
)
