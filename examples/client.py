"""Stream a chat from a server: `cbatch serve`, then `python examples/client.py`."""

import sys

from openai import OpenAI


def main(url: str = "http://localhost:8000") -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "def factorial(n):"}],
            max_completion_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"max_lookahead": 4},  # fields that OpenAI does not have
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                print(f"\n--- {chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
