"""LiteLLM: litellm_chat.py URL MODEL; prints one line of JSON. Runs in the clients' environment."""

import asyncio
import json
import sys

import litellm

url, name = sys.argv[1:]
at = {"api_base": url, "api_key": "none", "num_retries": 0}
asked = {"model": f"openai/{name}", "temperature": 0, "max_tokens": 32, **at}
messages = [{"role": "user", "content": "Name the capital of France."}]


async def four() -> list[str]:
    answers = await asyncio.gather(*(litellm.acompletion(messages=messages, **asked) for _ in range(4)))
    return [answer.choices[0].message.content for answer in answers]


def refusal(**fields: object) -> str:
    try:
        litellm.completion(**{**asked, "messages": messages, **fields})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "answered"


pieces = litellm.completion(messages=messages, stream=True, **asked)
print(
    json.dumps(
        {
            "text": litellm.completion(messages=messages, **asked).choices[0].message.content,
            "streamed": "".join(piece.choices[0].delta.content or "" for piece in pieces),
            "asynchronous": asyncio.run(four()),
            "completion": litellm.text_completion(
                **{**asked, "model": f"text-completion-openai/{name}"}, prompt="One, two,"
            )
            .choices[0]
            .text,
            "refused": refusal(model="openai/other"),
            "too_long": refusal(messages=[{"role": "user", "content": "word " * 3000}]),
        }
    )
)
