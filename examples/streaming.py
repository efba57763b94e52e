"""Drive the engine step by step, two requests at once: `python examples/streaming.py`."""

from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.demo import demo_paths


def main() -> None:
    engine, info = load_engine(*demo_paths(), EngineOptions(max_num_seqs=8))
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=1)
    names = {}
    for name, prompt in (("area", "def area(radius):\n"), ("mean", "def mean(values):\n")):
        names[engine.add(prompt, params).request_id] = name
    while engine.has_work:
        for output in engine.step():  # what one pass of the model added to each request
            name = names[output.request_id]
            print(f"{name}: {output.num_accepted} of {output.num_drafted} drafts, {output.text!r}")
            if output.finished is not None:
                print(f"{name}: {output.finished.finish_reason.value}")


if __name__ == "__main__":
    main()
