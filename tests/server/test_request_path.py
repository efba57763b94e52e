"""The number of files whose functions run for one streamed, sampled completion with a draft model,
after warm-up. It is traced in one process, with the engine in a thread."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import cbatch
from cbatch.demo import demo_paths
from cbatch.engine.build import load_core
from cbatch.engine.model_files import load_tokenizers
from cbatch.engine.options import EngineOptions
from cbatch.process.client import EngineClient
from cbatch.server.serving.service import EngineService
from tests.process.threads import EngineThread
from tests.server.http_client import serving_service

PACKAGE = Path(cbatch.__file__).parent
BODY = {"prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 1}
MAX_FILES = {"server": 12, "process": 5, "engine": 3, "text": 5, "core/request": 4}
MAX_FILES_IN_ALL = 67


class Trace:
    """Records the files whose functions run while `active`, in threads that start after it."""

    def __init__(self) -> None:
        self.active = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.active and event == "call":
            self.files.add(frame.f_code.co_filename)


def test_a_request_touches_few_files() -> None:
    trace = Trace()
    options = EngineOptions(max_num_seqs=4)
    core, _, _ = load_core(*demo_paths(), options, handles_text=False)
    tokenizer = load_tokenizers(*demo_paths(), options)
    service = EngineService(EngineClient(partial(EngineThread, core)), tokenizer)
    threading.setprofile(trace)
    try:
        with core.resources, serving_service(service, tokenizer) as client:
            client.stream(BODY)
            trace.active = True
            events = client.stream(BODY)
            trace.active = False
    finally:
        threading.setprofile(None)
    assert sum(len(event["choices"]) for event in events) > 3
    files = [Path(f).relative_to(PACKAGE) for f in trace.files if PACKAGE in Path(f).parents]
    folders = Counter(
        folder
        for file in files
        for folder in {file.parts[0], file.parent.as_posix()}
        if folder in MAX_FILES
    )
    assert folders.keys() == MAX_FILES.keys(), "a folder was not traced"
    assert all(folders[name] <= limit for name, limit in MAX_FILES.items()), folders
    assert 40 < len(files) <= MAX_FILES_IN_ALL, sorted(map(str, files))
