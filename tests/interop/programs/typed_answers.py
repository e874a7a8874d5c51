"""Pydantic AI and Instructor: typed_answers.py URL MODEL; prints one line of JSON. Runs in the clients' environment."""

import asyncio
import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Ship(BaseModel):
    """A ship."""

    model_config = ConfigDict(extra="forbid")  # else a small model never ends

    name: str = Field(max_length=40)
    year: int = Field(ge=1000, le=2100)


url, name = sys.argv[1:]
question = "Name the capital of France."
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="none"))
short = ModelSettings(temperature=0, max_tokens=32)
agent = Agent(model, model_settings=short)
typed = Agent(model, output_type=Ship, model_settings=ModelSettings(temperature=0, max_tokens=200), retries=3)


async def streamed() -> list[str]:
    async with agent.run_stream(question) as result:
        return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]


def of_instructor(mode: instructor.Mode) -> dict[str, object]:
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
    ask = [{"role": "user", "content": "Invent a ship."}]
    return client.create(model=name, messages=ask, response_model=Ship, temperature=0, max_tokens=200).model_dump()


modes = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
whole = agent.run_sync(question)
pieces = asyncio.run(streamed())
print(
    json.dumps(
        {
            "text": whole.output,
            "output_tokens": whole.usage.output_tokens,
            "streamed": "".join(pieces),
            "pieces": len(pieces),
            "typed": typed.run_sync("Invent a ship.").output.model_dump(),
            "instructor": {mode.name: of_instructor(mode) for mode in modes},
        }
    )
)
