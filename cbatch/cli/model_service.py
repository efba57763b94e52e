"""The engine service built from `ServeSettings`, with its tokenizer, chat template and keys, for
`cbatch serve` and for replicas of Ray Serve."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path

import msgspec

from cbatch.cli.options import model_paths
from cbatch.cli.serve_settings import ServeSettings
from cbatch.core.prices.chunk_sizes import PROMPT_SHARE
from cbatch.core.request.errors import FieldError
from cbatch.engine.info import EngineInfo
from cbatch.engine.model_files import chat_template_of, find_model, gguf_of, load_tokenizers
from cbatch.kv_events.publisher import configured_publisher
from cbatch.process.client import EngineClient
from cbatch.process.factory import EngineFactory
from cbatch.process.server import EngineProcess
from cbatch.server.http.keys import KeyRing, configured_keys
from cbatch.server.protocol.model import ServedModel
from cbatch.server.serving.service import EngineService
from cbatch.server.serving.tracing import span_exporter
from cbatch.steplog.step_log import StepLogError, open_to_append

_logger = logging.getLogger("cbatch")


class ModelParts:
    """Parts of a server: the model's files, tokenizer, chat template, API keys, engine options.
    The constructor checks the settings. The engine starts in `start`."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        model, draft = model_paths(settings.model, settings.draft)
        self._model = find_model(model)
        self._draft = None if draft is None else find_model(draft, "draft")
        for field, path in (("model", self._model), ("draft", self._draft)):
            require_model(field, path)
        secrets = configured_keys(settings.api_key, settings.api_key_file)
        shares = settings.share_prefix_cache
        if shares and not settings.engine.enable_prefix_caching:
            problem = "has nothing to share without the prefix cache"
            raise FieldError("share_prefix_cache", problem, "leave one of the two options out")
        self.keys = KeyRing(
            secrets,
            max_requests_per_key=settings.max_requests_per_key,
            share_prefix_cache=shares,
        )
        share = settings.engine.prompt_share
        self._options = msgspec.structs.replace(
            settings.engine,
            generation_config=settings.generation_config,
            prompt_share=PROMPT_SHARE if share is None else share,
        )
        # Keep the GGUF file, if any, in `read_gguf`'s weak cache for both calls below.
        gguf = gguf_of(self._model)
        self._chat_template = chat_template_of(self._model, settings.chat_template)
        self._tokenizer = load_tokenizers(self._model, self._draft, self._options)
        del gguf
        for origin in settings.cors_origin:
            if origin != "*" and "://" not in origin:
                remedy = "give a scheme and a host, as https://app.example, or *"
                raise FieldError("cors_origin", f"{origin!r} is not an origin", remedy)
        if settings.tool_parser not in ("auto", "none") and self._tokenizer is None:
            raise FieldError("tool_parser", "needs a tokenizer", "give one, or leave this out")
        require_record(settings.record)
        endpoint = settings.otlp_endpoint
        self.span_exporter = None if endpoint is None else span_exporter(endpoint)

    def make_service(self) -> EngineService:
        """Return the service, without starting its engine. If KV events are configured, their
        publisher listens from now on."""
        settings = self._settings
        kv_events = configured_publisher(
            settings.kv_events_config, caches_prefixes=settings.engine.enable_prefix_caching
        )
        factory = EngineFactory(
            self._model,
            self._draft,
            self._options,
            settings.log_format,
            settings.record,
            kv_events=kv_events is not None,
        )
        client = EngineClient(partial(EngineProcess, factory), hang_timeout_s=settings.hang_timeout)
        return EngineService(
            client,
            self._tokenizer,
            limits=settings.limits,
            seed=self._options.seed,
            kv_events=kv_events,
        )

    async def start(self, service: EngineService) -> ServedModel:
        engine = await service.start()
        info = msgspec.convert(engine.info, EngineInfo)
        for line in info.lines():
            _logger.info(line)
        settings = self._settings
        served = ServedModel(
            settings.served_model_name or Path(settings.model or "cbatch-demo").name,
            max_model_len=engine.config.max_model_len,
            vocab_size=engine.config.vocab_size,
            created_s=int(time.time()),
            root=str(self._model),
            tokenizer=self._tokenizer,
            chat_template=self._chat_template,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
            sampling_defaults=info.sampling_defaults,
        )
        calls = served.tool_parser or "none"
        _logger.info(f"reasoning parser: {served.reasoning_parser}; tool call parser: {calls}")
        return served


def require_model(field: str, path: str | Path | None) -> None:
    if path is not None and Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        remedy = "name a Hugging Face model directory (config.json, *.safetensors) or a .gguf file"
        raise FieldError(field, f"{path} has no config.json", remedy)


def require_record(path: str | None) -> None:
    if path is None:
        return
    try:
        os.close(open_to_append(Path(path)))
    except (OSError, StepLogError) as error:
        remedy = "name a new file, or a step log, in a folder that exists"
        raise FieldError("record", f"{path} cannot be written ({error})", remedy) from error
