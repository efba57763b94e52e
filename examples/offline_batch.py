"""Complete many prompts at once: `python examples/offline_batch.py`."""

from cbatch import LLM, SamplingParams
from cbatch.demo import demo_paths

PROMPTS = ["def add(a, b):\n", "class Stack:\n", "def is_even(number):\n"]


def main() -> None:
    target, draft = demo_paths()  # or Hugging Face directories of your own
    llm = LLM(target, draft)
    params = SamplingParams(max_tokens=24, temperature=0, stop=("\ndef ",))
    for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        if completion.error is not None:  # only this prompt failed; the others were completed
            print(f"--- refused: {completion.error}")
            continue
        gained = completion.speculation.mean_accepted_tokens
        print(f"--- {completion.finish_reason.value}, tokens a step: {gained}")
        print(prompt + completion.text)


if __name__ == "__main__":
    main()
