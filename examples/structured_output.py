"""Output that follows a JSON schema, drafts included: `python examples/structured_output.py`."""

import json

from cbatch import LLM, SamplingParams, StructuredOutputs
from cbatch.demo import demo_paths

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["add", "subtract"]},
        "arguments": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def main() -> None:
    llm = LLM(*demo_paths())
    params = SamplingParams(
        max_tokens=64, temperature=0, structured_outputs=StructuredOutputs(json=SCHEMA)
    )
    (completion,) = llm.generate(["# The call of a function as JSON:\n"], params)
    print(completion.text, completion.finish_reason.value)
    print(json.loads(completion.text)["name"])


if __name__ == "__main__":
    main()
