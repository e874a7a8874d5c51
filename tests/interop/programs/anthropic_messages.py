"""The anthropic package: anthropic_messages.py URL MODEL; prints one line of JSON. Runs in the clients' environment."""

import asyncio
import json
import sys

import anthropic

url, name = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
question = [{"role": "user", "content": "Name the capital of France."}]
asked = {"model": name, "max_tokens": 32, "messages": question, "extra_body": {"temperature": 0}}
weather = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def refusal(**fields: object) -> str:
    try:
        client.messages.create(**{**asked, **fields})
    except anthropic.APIStatusError as error:
        return f"{type(error).__name__}: {error.message}"
    return "answered"


async def four() -> list[str]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as api:
        answers = await asyncio.gather(*(api.messages.create(**asked) for _ in range(4)))
    return [answer.content[0].text for answer in answers]


whole = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    pieces = list(stream.text_stream)
    final = stream.get_final_message()
forced = {"tools": [weather], "tool_choice": {"type": "tool", "name": "weather"}}
called = client.messages.create(**{**asked, **forced})
[use] = called.content
answered = client.messages.create(
    **{
        **asked,
        "tools": [weather],
        "messages": [
            *question,
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]},
        ],
    }
)
asked_for = []


@anthropic.beta_tool
def weather_of(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    asked_for.append(city)
    return "sunny"


# Its turns are threads at first, which a server may refuse: then it sends the whole conversation.
runner = client.beta.messages.tool_runner(
    model=name, max_tokens=96, messages=question, tools=[weather_of], max_iterations=2,
    tool_choice={"type": "tool", "name": "weather_of"}, extra_body={"temperature": 0},
)  # fmt: skip
turns = list(runner)
page = client.models.list()
print(
    json.dumps(
        {
            "text": whole.content[0].text,
            "streamed": "".join(pieces),
            "pieces": len(pieces),
            "reasons": [whole.stop_reason, final.stop_reason, called.stop_reason],
            "usage": [whole.usage.output_tokens, final.usage.output_tokens],
            "counted": [
                client.messages.count_tokens(model=name, messages=question).input_tokens,
                whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
            ],
            "call": [use.name, use.input],
            "after_call": answered.stop_reason,
            "tool_runner": [len(turns), [turn.stop_reason for turn in turns], len(asked_for)],
            "models": [[model.id, model.type, model.display_name] for model in page],
            "request_id": whole._request_id,
            "asynchronous": asyncio.run(four()),
            "unknown": refusal(model="other"),
            "too_long": refusal(max_tokens=5000),
            "thinking": refusal(thinking={"type": "enabled", "budget_tokens": 2000}),
        }
    )
)
